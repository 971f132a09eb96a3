"""The measuring behind `trunkline bench`: a server from outside, and the prefix cache from inside.

`bench serve` knows HTTP and a tokenizer, and nothing of our engine, so that we and a peer are measured
by the same program.

    texts.py      English-looking text of an exact number of tokens
    workloads.py  W1 … W6: what is sent
    client.py     one streamed request, and its timestamps
    runner.py     a workload run against a server
    report.py     the numbers, as a table and as JSON
    cli.py        the command line

`bench cache` calls the prefix cache, and needs no server and no model.

    cache.py      what each operation costs
    replay.py     recorded traffic through it
    cache_cli.py  the command line

tables.py aligns what both print.
"""
