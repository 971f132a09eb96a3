"""The load generator behind `trunkline bench serve`: the same workloads against any server that speaks the OpenAI API.

It knows HTTP and a tokenizer, and nothing of our engine, so that we and a peer are measured by the same program.

    texts.py      English-looking text of an exact number of tokens
    workloads.py  W1 … W6: what is sent
    client.py     one streamed request, and its timestamps
    runner.py     a workload run against a server
    report.py     the numbers, as a table and as JSON
    cli.py        the command line
"""
