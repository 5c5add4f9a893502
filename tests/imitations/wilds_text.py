"""Small imitations of WILDS' comments and reviews, and of a model to read them with. None of it is real.

A few words go with the label, so that there is something to learn.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

MODEL, TOKENS, WIDTH, LAYERS = "tiny-bert", 512, 32, 2
FILLERS = (  # noqa: SIM905
    "a about again all and any are as at been but by can did do down each few for from had has have here how "
    "if in into is it just me more most my no nor not now of off on once only or other our out over own same "
    "she so some such than that the their them then there these they this those through to too under until "
    "up very was we were what when where which while who why will with you"
).split()
TONE = (["decent", "kind", "polite", "warm"], ["nasty", "rude", "silly", "ugly"])
STARS = (["broken", "junk"], ["poor", "weak"], ["okay", "plain"], ["good", "solid"], ["great", "superb"])
ODD = ('said "so"', "a\nb", "1,2", "çà né", "日本", "…", "🙂", "C:\\x")  # what tables stumble over
AMAZON_HEADER = (
    *("reviewerID", "asin", "overall", "reviewTime", "unixReviewTime", "reviewText", "summary", "verified"),
    *("category", "reviewYear"),
)


def words(rng: np.random.Generator, own: Sequence[str], row: int, least: int = 3) -> str:
    """A text with two words of ``own`` somewhere in it."""
    odd = [ODD[row // 7 % len(ODD)]] if row % 7 == 0 else []
    found = [*rng.choice(own, 2), *rng.choice(FILLERS, rng.integers(least, least + 37)), *odd]
    return " ".join(found[i] for i in rng.permutation(len(found)))


def fake_civilcomments(folder: Path) -> Path:
    """Comments that mention up to three of the eight identities, some of them none; a third are toxic."""
    identities = ["male", "female", "LGBTQ", "christian", "muslim", "other_religions", "black", "white"]
    place, rng, rows = folder / "civilcomments_v1.0", np.random.default_rng(0), []
    place.mkdir(parents=True)
    fake_tokenizer(folder)
    for row in range(900):
        toxic = bool(rng.random() < 0.35)
        who = rng.choice(9, rng.integers(1, 4), replace=False).tolist()
        if row < 180:  # each kind of people is mentioned by toxic and by other comments: no group is empty
            toxic, who = row // 45 % 2 == 0, [row // 5 % 9]
        shares = {name: share(rng, n in who and 8 not in who) for n, name in enumerate(identities)}
        shares |= {"toxicity": share(rng, toxic), "obscene": None if row % 50 == 7 else 0.0}
        split = ("train", "train", "train", "val", "test")[row % 5]
        rows.append({"comment_text": words(rng, TONE[toxic], row), "split": split, **shares})
    others = ("identity_any", "severe_toxicity", "insult", "threat", "identity_attack", "sexual_explicit")
    table = pd.DataFrame(rows).assign(**dict.fromkeys(others, 0.0))
    table.to_csv(place / "all_data_with_identities.csv")
    (place / "RELEASE_v1.0.txt").touch()
    return place


def share(rng: np.random.Generator, yes: bool) -> float:
    """Which part of those who were asked said so."""
    return float(rng.choice([0.5, 0.6, 2 / 3, 0.8, 1.0] if yes else [0.0, 0.0, 1 / 6, 0.25, 0.49]))


def fake_amazon(folder: Path) -> Path:
    """Reviews by 18 reviewers, of whom eight are trained on; one in eight reviews is in no split."""
    place, rng, rows, splits = folder / "amazon_v2.1", np.random.default_rng(0), [], []
    (place / "splits").mkdir(parents=True)
    fake_tokenizer(folder)
    for row in range(1080):
        user, turn = row % 18, row // 18 % 8
        split = (0 if user < 8 else 1 if user < 13 else 3) if turn else -1
        if split == 0 and turn in (1, 2) and user % 2 == 0:
            split = 2 if turn == 1 else 4
        rows.append(amazon_review(rng, row, f"A{(7 * user) % 18:02d}"))
        splits.append(split)
    order = rng.permutation(len(rows))
    table = pd.DataFrame(rows, columns=AMAZON_HEADER).iloc[order]
    table.to_csv(place / "reviews.csv", index=False, quoting=csv.QUOTE_NONNUMERIC)
    pd.DataFrame({"split": splits, "clean": True}).iloc[order].to_csv(
        place / "splits" / "user.csv", index=False
    )
    (place / "RELEASE_v2.1.txt").touch()
    return place


def amazon_review(rng: np.random.Generator, row: int, reviewer: str, least: int = 3) -> list[Any]:
    """A row of ``reviews.csv``, of ``least`` words or more."""
    label, year = int(rng.integers(5)), 2000 + int(rng.integers(19))
    text, product = words(rng, STARS[label], row, least), f"B{int(rng.integers(40 + row // 20)):09d}"
    category = ("Books", "Toys_and_Games", "Electronics")[int(rng.integers(3))]
    about = [f"{1 + row % 12:02d} {1 + row % 28}, {year}", (year - 1970) * 31_556_952]
    return [reviewer, product, float(label + 1), *about, text, text[:20], True, category, year]


def fake_tokenizer(folder: Path) -> Path:
    """``tiny-bert``: a DistilBERT of two layers with random weights, for the words used here.

    It does for ``--model`` and for the option ``tokenizer`` of the datasets, without a network.
    """
    from safetensors.numpy import save_file

    place = folder / MODEL
    place.mkdir(parents=True, exist_ok=True)
    letters = [c for c in map(chr, range(33, 127)) if not c.isupper()]
    known = [*(word for words in (*TONE, *STARS) for word in words), *FILLERS]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    vocabulary += [word for word in dict.fromkeys(known) if len(word) > 1]
    vocabulary += [f"word{n}" for n in range(210 - len(vocabulary))]
    (place / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    config = {"model_type": "distilbert", "dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_heads": 2}
    config |= {"n_layers": LAYERS, "max_position_embeddings": TOKENS, "initializer_range": 0.2}
    config |= {"pad_token_id": 0, "vocab_size": len(vocabulary), "architectures": ["DistilBertModel"]}
    tokenizer = {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": True, "model_max_length": TOKENS}
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    save_file(_weights(len(vocabulary)), place / "model.safetensors", metadata={"format": "pt"})
    return place


def _weights(count: int) -> dict[str, NDArray[np.float32]]:
    """Random weights under the names that DistilBERT has for them."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings": (count, WIDTH),
        "embeddings.position_embeddings": (TOKENS, WIDTH),
        "embeddings.LayerNorm": (WIDTH,),
    }
    for n in range(LAYERS):
        layer = f"transformer.layer.{n}."
        shapes |= {f"{layer}attention.{name}_lin": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        shapes |= {f"{layer}ffn.lin1": (2 * WIDTH, WIDTH), f"{layer}ffn.lin2": (WIDTH, 2 * WIDTH)}
        shapes |= {f"{layer}{name}_layer_norm": (WIDTH,) for name in ("sa", "output")}
    rng, found = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        drawn = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.2, shape)
        found[f"{name}.weight"] = drawn.astype(np.float32)
        if not name.endswith("_embeddings"):
            found[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    return found
