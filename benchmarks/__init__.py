"""What the claims about speed rest on; each module is a program."""

import sys

MEPROP = "docs/results/backward.md has its figures; recipes train with backward=meprop"
RETIRED = {
    "14d387c5": {
        "benchmarks.codecs --feedback": "benchmarks.step times a whole step",
        "benchmarks.correlated": "docs/decisions.md has its figures",
        "benchmarks.duplex": "benchmarks.network measures collectives on a link",
        "benchmarks.noise": "docs/results/more-ranks.md has its figures",
        "benchmarks.staleness": "docs/results/async.md has its figures",
    },
    "815420b5": {
        "benchmarks.advise": "docs/results/predictions.md has its figures; benchmarks.time_to_target --part table "
        "compares what advise predicts with measured steps, and benchmarks.choices what auto does",
        "benchmarks.asynchronous kills": "docs/results/async.md has them; tests/contrib/asynchronous kills ranks",
        "benchmarks.backward --accuracy": MEPROP,
        "benchmarks.backward --parts": "docs/results/backward.md has its figures",
        "benchmarks.backward --recipes": MEPROP,
        "benchmarks.delay": "docs/settings.md has its figures; benchmarks.network --set delay measures steps",
        "benchmarks.gossip pairs": "docs/results/gossip.md has them; benchmarks.gossip network times AD-PSGD's steps",
        "benchmarks.gossip toy": "docs/gossip.md has its figure, and tests/gossip/test_moniqua.py the toy",
        "benchmarks.memory": "docs/results/cost.md has its figures; benchmarks.step tells bytes per parameter on a GPU",
        "benchmarks.network --trainer": "docs/decisions.md says what Lightning's broadcast does",
        "benchmarks.optimizers --csv": "docs/results/below-four-bits.md has its figures; --methods compares others",
        "benchmarks.optimizers --markdown": "docs/results/below-four-bits.md has its figures",
        "benchmarks.recovery": "docs/results/accuracy.md has its figures; recipes train with recovery=theta",
        "benchmarks.time_to_target --part whole": "docs/results/time-to-target.md has its figures",
    },
    "c7b30f62": {
        "benchmarks.accuracy": "docs/results/accuracy.md has them; recipes train experiment=resnet_cifar10_short",
        "benchmarks.asynchronous": "docs/results/async.md has its figures; benchmarks.gossip network times such steps",
        "benchmarks.backward": "docs/results/backward.md has its figures",
        "benchmarks.error --spectra": "docs/results/error.md has its figures",
        "benchmarks.host_time": "benchmarks.step measures it on a GPU, benchmarks.launches counts calls without one",
    },
}
"""Studies that were needed once, by the last commit that has them, and what there is in their place."""

if sys.argv[:1] == ["-m"]:  # Python looks for the module that it shall run
    words = {word.partition("=")[0] for word in sys.orig_argv}
    for commit, studies in RETIRED.items():
        for study, instead in studies.items():
            if words.issuperset(study.split()):
                sys.exit(f"{study} is no longer here: {instead}. Commit {commit} is the last that has it.")
