"""The command line, `flashattn-ext {train,bench,experiments,report,doctor}`, and the laboratory behind it: the library imports none of this.

`main.py` dispatches, every command has its own file. `timing.py`, `bench_cases.py`, `bench_contestants.py` and `console.py` are shared by
benchmarks and experiments: clocks, cases, the attentions that are compared, tables.
"""
