"""Where a step of the engine goes: `trunkline bench step --profile`.

profile.py    a step's parts, and what each has to read and compute
profiler.py   steps of the real engine, and their marks
report.py     as a table, and as JSON
command.py    the command line

Unlike trunkline/bench/ it knows the engine from inside: scheduler, worker and kernels.
"""
