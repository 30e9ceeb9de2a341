"""The quickstart's first rung: a byte-level model from scratch on worked examples of unit conversion, in a minute on two cores.

    python train.py config/quickstart.py --out_dir=out/base

771,456 parameters. The rest are train.py's defaults. Four query heads share one key head: sampling, which reads the keys and values of
every earlier position for each token, is 1.4 times as fast as with two heads that have their own, at the same loss (docs/notes.md).
"""
dataset = "task:unit_conversion"
out_dir = "out/base"

n_head = 4
n_kv_head = 1
