"""The command line: `flashattn-ext {train,bench,doctor}`.

`main.py` dispatches, every command has its own file.
"""
