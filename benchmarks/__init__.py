"""What the claims about speed rest on; each module is a program."""

import sys

RETIRED = {
    "benchmarks.correlated": "docs/decisions.md has its figures",
    "benchmarks.duplex": "benchmarks.network measures collectives on a link",
    "benchmarks.noise": "docs/results/more-ranks.md has its figures",
    "benchmarks.staleness": "docs/async.md has its figures; benchmarks.asynchronous trains such ranks",
}
"""Studies that were needed once, and what there is in their place."""

if sys.argv[:1] == ["-m"]:  # Python looks for the module that it shall run
    for word in sys.orig_argv:
        if word in RETIRED:
            sys.exit(f"{word} is no longer here: {RETIRED[word]}. Commit 14d387c5 is the last that has it.")
