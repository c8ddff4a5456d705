"""The command line: `flashattn-ext {train,bench,experiments,report,doctor}`.

`main.py` dispatches, every command has its own file.
"""
