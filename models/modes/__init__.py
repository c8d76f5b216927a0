"""Modes: ways to run the rounds of a batch that give the same outputs.

A mode determines where the grammar steps of a round run, and whether a launch runs one round or a
loop of many.

parts, build
    What the graphs of all modes consist of, and building them.
launch
    Selection of the graph of each launch.
promotion, automaton_steps
    Grammar steps that kernels run for requests whose grammar has an automaton.
loop
    Generation loops: many rounds in one launch of a graph.
stats
    Counters.
"""
