"""The benchmark suite: the same programs on Stemma and on its peers, in one run.

`workloads` are programs of the language. `recorder` plays one once and notes what it asked of the
model, as `work`. `contenders` do that work: ours run the program itself, `peers` replay what was
noted, each in a process of its own. `measure` takes turns, `floor` tells the machine's limit,
`report` writes the results down.
"""
