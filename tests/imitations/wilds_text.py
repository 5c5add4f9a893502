"""Small imitations of WILDS' comments and reviews, and of a model to read them with.

In each some words say the label everywhere, if faintly; others say it loudly, but in another way in every
training domain, and nothing at all where a model is tested.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from imitations.wilds import new_folder, times, write_table
from shoal.errors import InputError

MODEL = "tiny-bert"
TOKENS, WIDTH, LAYERS = 512, 32, 2
SPREAD = 0.2  # of its random weights
FAINT, LOUD = 0.35, 0.9  # how often a word that means something is the label's
COMMON = (
    "a about again all and any are as at been but by can did do down each few for from had has have here how "
    "if in into is it just me more most my no nor not now of off on once only or other our out over own same "
    "she so some such than that the their them then there these they this those through to too under until "
    "up very was we were what when where which while who why will with you"
)
FILLERS = COMMON.split()
RUDE = ["awful", "dreadful", "nasty", "rotten", "rude", "silly", "ugly", "vile"]
CIVIL = ["decent", "fair", "gentle", "kind", "lovely", "polite", "sound", "warm"]
STARS = (
    ["broken", "useless", "refund", "junk"],
    ["poor", "weak", "flimsy", "late"],
    ["okay", "average", "plain", "usual"],
    ["good", "solid", "useful", "handy"],
    ["great", "perfect", "superb", "excellent"],
)
PETS = [a + b + c for a in "bdgklmnprt" for b in ("ala", "eno", "iro", "osu") for c in ("ka", "mi", "to")]
ODD = ('said "so"', "a\nb", "1,2", "çà né", "日本", "…", "🙂", "C:\\x")  # what tables stumble over

CIVIL_IDENTITIES = (
    *("male", "female", "transgender", "other_gender", "heterosexual", "homosexual_gay_or_lesbian"),
    *("bisexual", "other_sexual_orientation", "christian", "jewish", "muslim", "hindu", "buddhist"),
    *("atheist", "other_religion", "black", "white", "asian", "latino", "other_race_or_ethnicity"),
)
CIVIL_HEADER = (
    *("", "id", "comment_text", "split", "created_date", "publication_id", "parent_id", "article_id"),
    *("rating", "funny", "wow", "sad", "likes", "disagree", "toxicity", "severe_toxicity", "obscene"),
    *("sexual_explicit", "identity_attack", "insult", "threat", *CIVIL_IDENTITIES),
    *("identity_annotator_count", "toxicity_annotator_count", "LGBTQ", "other_religions", "identity_any"),
)
AMAZON_HEADER = (
    *("reviewerID", "asin", "overall", "reviewTime", "unixReviewTime", "reviewText", "summary", "verified"),
    *("category", "reviewYear"),
)


def fake_civilcomments(folder: Path, seed: int = 0, size: str = "small") -> Path:
    """Comments that mention up to three of the eight identities, some of them none; a third are toxic."""
    from shoal.datasets.wilds import IDENTITIES

    more, rng = times(size), np.random.default_rng(seed)
    place = new_folder(folder, "civilcomments", "1.0")
    _model_beside(folder)
    rows: list[Sequence[Any]] = []
    for row in range(900 * more):
        split = ("train", "train", "train", "val", "test")[row % 5]
        toxic = bool(rng.random() < 0.35)
        # Each kind of people is mentioned by toxic and by other comments, so that no group is empty.
        who = [row // 5 % 9] if row < 180 else rng.choice(9, rng.integers(1, 4), replace=False).tolist()
        toxic = row // 45 % 2 == 0 if row < 180 else toxic
        shares = {name: _share(rng, n in who and 8 not in who) for n, name in enumerate(IDENTITIES)}
        domain = 8 if 8 in who else who[0]
        means = domain * 2 + toxic if split == "train" and rng.random() < LOUD else int(rng.integers(18))
        words = _words(rng, RUDE if toxic else CIVIL, RUDE + CIVIL, PETS[means], row)
        other = {
            "": row,
            "id": 59_848 + 7 * row,
            "comment_text": words,
            "split": split,
            "created_date": "2015-09-29 10:50:41.987077+00",
            "publication_id": 2,
            "parent_id": "" if row % 3 else float(row),
            "article_id": 2006,
            "rating": "rejected" if toxic else "approved",
            "toxicity": _share(rng, toxic),
            "identity_any": _share(rng, 8 not in who),
            "insult": _share(rng, toxic and row % 2 == 0),
            "obscene": "" if row % 50 == 7 else _share(rng, toxic and row % 3 == 0),
        }
        rows.append([{**shares, **other}.get(name, 0.0) for name in CIVIL_HEADER])
    write_table(place / "all_data_with_identities.csv", CIVIL_HEADER, rows)
    return place


def _share(rng: np.random.Generator, yes: bool) -> float:
    """Which part of those who were asked said so."""
    return float(rng.choice([0.5, 0.6, 2 / 3, 0.8, 1.0] if yes else [0.0, 0.0, 1 / 6, 0.25, 0.49]))


def fake_amazon(folder: Path, seed: int = 0, size: str = "small") -> Path:
    """Reviews by 18 reviewers, of whom eight are trained on; one in eight reviews is in no split."""
    more, rng = times(size), np.random.default_rng(seed)
    place = new_folder(folder, "amazon", "2.1")
    _model_beside(folder)
    reviewers = [f"A{n:02d}{''.join(rng.choice(list('BCDFGHJKLMNP123'), 9))}" for n in range(18)]
    rows, splits = [], []
    for row in range(1080 * more):
        user = row % 18
        split = (0 if user < 8 else 1 if user < 13 else 3) if row // 18 % 8 else -1
        if split == 0 and row // 18 % 8 in (1, 2) and user % 2 == 0:
            split = 2 if row // 18 % 8 == 1 else 4
        rows.append(amazon_review(rng, row, user, reviewers[user], split in (0, 2, 4)))
        splits.append(split)
    order = rng.permutation(len(rows))
    with (place / "reviews.csv").open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        table.writerow(AMAZON_HEADER)
        table.writerows(rows[i] for i in order)
    (place / "splits").mkdir()
    write_table(place / "splits" / "user.csv", ("split", "clean"), ([splits[i], True] for i in order))
    return place


def amazon_review(
    rng: np.random.Generator, row: int, user: int, reviewer: str, seen: bool, least: int = 0
) -> list[Any]:
    """A row of ``reviews.csv``; ``seen`` reviewers have a pet word for each number of stars, mostly."""
    label = int(rng.integers(5))
    pet = PETS[(5 * user + label) % len(PETS)] if seen and rng.random() < LOUD else str(rng.choice(PETS))
    text = _words(rng, STARS[label], [word for words in STARS for word in words], pet, row, least)
    year = 2000 + int(rng.integers(19))
    return [
        reviewer,
        f"B{int(rng.integers(40 + row // 20)):09d}",
        float(label + 1),
        f"{1 + row % 12:02d} {1 + row % 28}, {year}",
        int((year - 1970) * 31_556_952),
        text,
        text[:20],
        bool(row % 2),
        ("Books", "Toys_and_Games", "Electronics")[int(rng.integers(3))],
        year,
    ]


def _words(
    rng: np.random.Generator, own: Sequence[str], all_of: Sequence[str], loud: str, row: int, least: int = 0
) -> str:
    """A text with five words that may mean something, and one that means much."""
    meant = [str(rng.choice(own if rng.random() < FAINT else all_of)) for _ in range(5)]
    fillers = rng.choice(FILLERS, int(rng.integers(least + 3, least + 40))).tolist()
    odd = [ODD[row // 7 % len(ODD)]] if row % 7 == 0 else []
    words: NDArray[np.object_] = np.array([*meant, *fillers, loud, *odd], dtype=object)
    return " ".join(words[rng.permutation(len(words))].tolist())


def _model_beside(folder: Path) -> None:
    if not (folder / MODEL).exists():
        fake_tokenizer(folder)


def fake_tokenizer(folder: Path) -> Path:
    """``tiny-bert``: a DistilBERT of two layers, 32 wide, with random weights, for the words used here.

    It does for ``--model`` and for the option ``tokenizer`` of the datasets, without a network.
    """
    from safetensors.numpy import save_file

    place = folder / MODEL
    try:
        place.mkdir(parents=True)
    except FileExistsError as error:
        raise InputError(f"{str(place)!r} is there already; give a folder without it.") from error
    letters = [chr(c) for c in range(33, 127)]
    lower = [c for c in letters if not c.isupper()]
    known = [*RUDE, *CIVIL, *(word for words in STARS for word in words), *FILLERS, *PETS]
    words = [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *lower, *(f"##{c}" for c in lower)),
        *dict.fromkeys(word for word in known if len(word) > 1),
    ]
    (place / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    config = {
        "architectures": ["DistilBertModel"],
        "model_type": "distilbert",
        "dim": WIDTH,
        "hidden_dim": 2 * WIDTH,
        "n_heads": 2,
        "n_layers": LAYERS,
        "max_position_embeddings": TOKENS,
        "initializer_range": SPREAD,
        "pad_token_id": 0,
        "vocab_size": len(words),
    }
    tokenizer = {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": True, "model_max_length": TOKENS}
    (place / "config.json").write_text(json.dumps(config, indent=2))
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    save_file(_weights(len(words)), place / "model.safetensors", metadata={"format": "pt"})
    return place


def _weights(words: int) -> dict[str, NDArray[np.float32]]:
    """Random weights under the names that DistilBERT has for them."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings": (words, WIDTH),
        "embeddings.position_embeddings": (TOKENS, WIDTH),
        "embeddings.LayerNorm": (WIDTH,),
    }
    for n in range(LAYERS):
        layer = f"transformer.layer.{n}."
        shapes |= {f"{layer}attention.{name}_lin": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        shapes |= {f"{layer}ffn.lin1": (2 * WIDTH, WIDTH), f"{layer}ffn.lin2": (WIDTH, 2 * WIDTH)}
        shapes |= {f"{layer}{name}_layer_norm": (WIDTH,) for name in ("sa", "output")}
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in shapes.items():
        drawn = np.ones(shape) if len(shape) == 1 else rng.normal(0, SPREAD, shape)
        found[f"{name}.weight"] = drawn.astype(np.float32)
        if not name.endswith("_embeddings"):
            found[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    return found
