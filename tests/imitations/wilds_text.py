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

from shoal.vision import load

MODEL = "tiny-bert"
IDENTITIES = ["male", "female", "LGBTQ", "christian", "muslim", "other_religions", "black", "white"]
TONE = (["decent", "kind", "polite", "warm"], ["nasty", "rude", "silly", "ugly"])
STARS = (["broken", "junk"], ["poor", "weak"], ["okay", "plain"], ["good", "solid"], ["great", "superb"])
FILLERS = (  # noqa: SIM905
    "a about again all and any are as at been but by can did do down each few for from had has have here how "
    "if in into is it just me more most my no nor not now of off on once only or other our out over own same "
    "she so some such than that the their them then there these they this those through to too under until"
).split()
ODD = ('said "so"', "a\nb", "1,2", "çà né", "日本", "…", "🙂", "C:\\x")  # what tables stumble over


def words(rng: np.random.Generator, own: Sequence[str], row: int) -> str:
    """A text with two words of ``own`` somewhere in it."""
    odd = [ODD[row // 7 % len(ODD)]] if row % 7 == 0 else []
    found = [*rng.choice(own, 2), *rng.choice(FILLERS, rng.integers(3, 40)), *odd]
    return " ".join(found[i] for i in rng.permutation(len(found)))


def fake_civilcomments(folder: Path) -> Path:
    """Comments that mention up to three of the eight identities, some of them none; a third are toxic."""
    place, rng, rows = folder / "civilcomments_v1.0", np.random.default_rng(0), []
    place.mkdir(parents=True)
    fake_tokenizer(folder)

    def share(yes: bool) -> float:
        """Which part of those who were asked said so."""
        return float(rng.choice([0.5, 0.6, 2 / 3, 0.8, 1.0] if yes else [0.0, 0.0, 1 / 6, 0.25, 0.49]))

    for row in range(900):
        toxic, who = bool(rng.random() < 0.35), rng.choice(9, rng.integers(1, 4), replace=False).tolist()
        if row < 180:  # each kind of people is mentioned by toxic and by other comments: no group is empty
            toxic, who = row // 45 % 2 == 0, [row // 5 % 9]
        shares = {name: share(n in who and 8 not in who) for n, name in enumerate(IDENTITIES)}
        shares |= {"toxicity": share(toxic), "obscene": None if row % 50 == 7 else 0.0}
        split = ("train", "train", "train", "val", "test")[row % 5]
        rows.append({"comment_text": words(rng, TONE[toxic], row), "split": split, **shares})
    others = ("identity_any", "severe_toxicity", "insult", "threat", "identity_attack", "sexual_explicit")
    pd.DataFrame(rows).assign(**dict.fromkeys(others, 0.0)).to_csv(place / "all_data_with_identities.csv")
    (place / "RELEASE_v1.0.txt").touch()
    return place


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
        label, year = int(rng.integers(5)), 2000 + int(rng.integers(19))
        review: dict[str, Any] = {"reviewerID": f"A{(7 * user) % 18:02d}", "asin": f"B{row % 40:09d}"}
        review |= {"overall": float(label + 1), "reviewTime": f"03 {1 + row % 28}, {year}"}
        review |= {"unixReviewTime": (year - 1970) * 31_556_952, "reviewText": words(rng, STARS[label], row)}
        rows.append(review | {"summary": "", "verified": True, "category": "Books", "reviewYear": year})
        splits.append(split)
    order = rng.permutation(len(rows))
    table = pd.DataFrame(rows).iloc[order]
    table.to_csv(place / "reviews.csv", index=False, quoting=csv.QUOTE_NONNUMERIC)
    user_split = pd.DataFrame({"split": splits, "clean": True}).iloc[order]
    user_split.to_csv(place / "splits" / "user.csv", index=False)
    (place / "RELEASE_v2.1.txt").touch()
    return place


def fake_tokenizer(folder: Path) -> Path:
    """``tiny-bert``: a DistilBERT of two layers with random weights, for the words used here.

    It does for ``--model`` and for the option ``tokenizer`` of the datasets, without a network.
    """
    import torch

    transformers, place = load("transformers", "text"), folder / MODEL
    place.mkdir(parents=True, exist_ok=True)
    letters = [c for c in map(chr, range(33, 127)) if not c.isupper()]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    vocabulary += [word for words in (*TONE, *STARS, FILLERS) for word in words if len(word) > 1]
    vocabulary += [f"word{n}" for n in range(210 - len(vocabulary))]
    (place / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    about = {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (place / "tokenizer_config.json").write_text(json.dumps(about))
    sizes = {"vocab_size": len(vocabulary), "dim": 32, "hidden_dim": 64, "n_heads": 2, "n_layers": 2}
    config = transformers.DistilBertConfig(**sizes, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.DistilBertModel(config).save_pretrained(place)
    return place
