"""Checkpoints of earlier versions, which every later version must go on from, bit for bit.

``python -m tests.golden_checkpoints`` writes those that are missing. One that is there is never written again: another
format is written by cases of its own, and the reader must know both.

    topk-2/epoch=0.ckpt                   after the first of two epochs, of 2 ranks
    topk-2/epoch=0.ckpt.lc/*.rank0.pt     what each rank keeps for itself
    topk-2/expected.json                  the weights and what the ranks kept after the second epoch
"""
