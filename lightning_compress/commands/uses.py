"""When to use each compressor, for the command line, the cards and the tables of all compressors."""

USES = {
    "auto": "Use it if you do not know the link: it measures, and picks none, bf16, or qsgd with 8 or 4 bits, packed "
    "or in Huffman codes.",
    "none": "Use it as the baseline: stock DDP, bit for bit.",
    "bf16": "Use it with any optimizer if the loss must be float32's: no loss on the character LSTM.",
    "fp16": "Use it if gradients stay above 1e-5: three more bits of mantissa than bf16; below 6e-8 they become 0.",
    "qsgd": "Use it first: its 4 bits keep the loss of float32 with SGD, Adam and AdamW. With Muon take 5 bits.",
    "rotated": "Use it for local steps, and where few elements are large: the smallest error from 4 bits on for most "
    "gradients. Not for large embeddings with Adam.",
    "range_float": "Use it with 8 bits where blocks differ in range: an error of 1.4 %.",
    "onebit": "Use it with SGD and momentum in long runs, if every step has to be averaged.",
    "efsign": "Use it as onebit, for half of its scales: one per block.",
    "topk": "Use it with SGD and momentum in long runs, with density 0.1 to 0.01 and dense warmup_steps.",
    "fft": "Use it for gradients whose neighbours are alike, as in convolutions; measure yours with compare first.",
    "powersgd": "Use it with SGD and momentum, for large matrices and many ranks.",
    "dgc": "Use it with SGD in long runs, down to density 0.001 after its warm-up of 4 epochs.",
    "onebit_adam": "Use it in place of Adam: give it torch.optim.SGD without momentum, Adam's learning rate, and "
    "warmup_steps of 15 to 25 % of the run.",
    "sparseloco": 'Use it for local steps of 15 to 50, with error_feedback={"decay": 0.95}.',
    "rows": "Use it for layers with meProp: it sends the rows that are not zero, without loss.",
    "moniqua": "Use it for gossip only: models modulo a bound on the distance of neighbours.",
    "natural": "For comparison: powers of two, unbiased, 8 bits. qsgd with 8 bits has less error so far.",
    "terngrad": "For comparison, with SGD only: -1, 0 or 1 times each parameter's scale. Take qsgd with 2 bits.",
    "terngrad_shared": "For comparison, with SGD only: terngrad, summed as integers by one all-reduce.",
    "signsgd": "For comparison: a majority vote of signs, with plain SGD at a learning rate as Adam's, 1e-4.",
    "dct": "For comparison: fft, by cosines.",
    "threshold": "For comparison: one fixed step for each element beyond a threshold that you know to suit the model.",
    "adaptive": "For comparison: topk with one mean for each sign, an eighth of its bytes.",
    "randomk": "For comparison: all ranks draw the same elements. It needs more steps than topk.",
    "wangni": "For comparison: unbiased sparsification; its noise grows as 1 / density.",
    "atomo": "For comparison: a few random singular vectors, unbiased but noisy, and slow to compute.",
    "sketch": "For comparison, with many ranks: topk of the mean itself, by tables that are summed.",
    "adam_mask": "For comparison, beside AdamW: the largest momentum's elements; it ended 22 % above dense or more.",
    "ef21": "For comparison: estimates of every rank's momentum; beside AdamW it ended 22 % above dense or more.",
    "qsgd_elias": "For comparison: qsgd in the paper's own code of what is not 0.",
}
"""Plain text: a terminal shows it as it is."""
