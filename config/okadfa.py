"""OKADFA's three parts, laid over any configuration of train.py: kernel attention, feedback, orthogonality (docs/okadfa.md).

    python train.py config/a100_fast.py config/okadfa.py --out_dir=out/okadfa_fast
    python train.py config/a100_production.py config/okadfa.py --out_dir=out/okadfa_production --dataset=FOLDER

Random features are kept in fp32 for the backward pass, so a micro-batch takes about twice the memory. Expect a higher
perplexity than without these parts. The guide expects one below 800, 600, 500 and 450 for a100_fast, a100_production,
a100_max and a100_mega. Not run on a GPU yet.
"""
mixer = "favor"          # attention by positive random features, linear in the length
mixer_features = 256     # of each head
backward = "feedback"    # the error at the top drives each block through a fixed random matrix
orthogonality = 0.01     # of attention's projections
orthogonality_warmup = 1000
