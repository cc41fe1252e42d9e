"""The chaos run: jobs keep coming in while everything is killed, frozen and cut; then every one is accounted for.

`python -m tests.chaos --help`, or `make chaos`. The way through it: `cluster` starts the service behind a `proxy`,
`producers` submit and note in the `ledger` what they were told, `faults` break things, `evidence` gathers what the
broker and the logs say in the end, `accounting` compares the two, `report` tells.
"""
