"""What gpu_visit.sh runs: checks and measurements on one GPU, part by part, each in a process of its own; see docs/gpu.md.

__main__.py      the visit: parts in order, their time, the JSON and the table
report.py        a row, and how rows become JSON and Markdown
part.py          one part, as the process that runs it sees it
scenes.py        random requests over scattered pages
ceilings.py … engine.py   the parts
"""
