"""The copy task over 20,000 steps, learnt within a few megabytes.

A recurrent network reads five symbols, then thousands of blanks, and must then say the five symbols
(Hochreiter and Schmidhuber, 1997). The gradient has to cross every step in between. Kept whole, the
states of those steps fill gigabytes; with a budget in bytes the loop keeps as many as fit, and
computes the others again.

The network is a gated recurrent unit whose gates start nearly closed, for as long as it will have
to remember (Tallec and Ollivier, 2018). It first learns the task over a hundred steps, then goes on
over all of them.

Run `python examples/rnn_long.py`; it needs matplotlib, optax and tqdm, and three minutes. It draws the
errors in rnn_long.png.
"""
