"""OKADFA's three parts, after any configuration of train.py (docs/okadfa.md).

    python train.py config/a100_fast.py config/okadfa.py --out_dir=out/okadfa_fast
    python train.py config/a100_max.py config/okadfa.py --out_dir=out/okadfa_max --dataset=FOLDER

Random features are kept in fp32 for the backward pass, so a micro-batch takes about twice the memory. Expect
a higher perplexity than without these parts; the guide expects less than 800, 600, 500 and 450 for a100_fast,
a100_production, a100_max and a100_mega. Not run on a GPU yet.
"""
mixer = "favor"          # attention by positive random features, of linear cost
mixer_features = 256     # for each head
backward = "feedback"    # each block gets the output error through a fixed random matrix
orthogonality = 0.01     # penalty on attention projections
orthogonality_warmup = 1000
