"""DistilBERT, BERT and other encoders of text as a :class:`~shoal.models.FeatureModel`, by transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.data.hub import Source, is_folder, need_transformers
from shoal.errors import InputError, check_names
from shoal.models.feature_model import FeatureModel
from shoal.models.lora import Alpha, Dropout, Rank, all_called, inject

CONFIGURATIONS = {
    "distilbert-base-uncased": "DistilBertConfig",
    "distilbert/distilbert-base-uncased": "DistilBertConfig",
    "bert-base-uncased": "BertConfig",
    "google-bert/bert-base-uncased": "BertConfig",
}
"""Whose defaults describe the model, so that no file is needed to build it."""
NAMES = (
    *("distilbert-base-uncased", "distilbert-base-cased", "distilroberta-base"),
    *("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "roberta-base", "roberta-large"),
    *("albert-base-v2", "xlm-roberta-base"),
)
"""Names without an owner before a slash that are offered."""
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Ways to compute it that transformers has itself; any other name is that of code it would fetch and run."""


def known(name: str) -> bool:
    """Whether it is a folder, or the name of an encoder of text."""
    return name in NAMES or "/" in name or is_folder(name)


def build(
    name: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    *,
    pretrained: bool = True,
    dropout: float | None = None,
    attention: str | None = None,
    lora: Rank | None = None,
    lora_alpha: Alpha | None = None,
    lora_dropout: Dropout = 0.0,
    lora_targets: list[str] | str | None = None,
) -> FeatureModel:
    """Build a text encoder with a linear head.

    The features are those before the last layer of the published classifier: for DistilBERT, the state of the
    first token after a linear layer and ReLU; for BERT and others, its pooled state. New layers are
    initialized as there, from a normal distribution with zero biases. Inputs are mappings with ``input_ids``
    and ``attention_mask`` (B, L).

    Args:
        name: name or folder of the encoder.
        input_shape: shape of an input, without the batch dimension.
        classes: number of classes, or ``None`` for regression.
        pretrained: use the published weights, or those in the folder; otherwise random ones. Only weights are
            read, and code that comes with a model is not executed.
        dropout: dropout rate of the features (default: that of the published classifier).
        attention: attention implementation of transformers; ``eager`` has second derivatives on every device.
        lora: rank of low-rank adapters (with peft); only these and the head are trained, and layers that are
            missing in the weights, such as the pooler of RoBERTa.
        lora_alpha: scale of the adapters, ``lora_alpha`` / ``lora`` (default: 2 · ``lora``).
        lora_dropout: dropout rate of the inputs of the adapters.
        lora_targets: names of linear layers, or their last parts, that get adapters (default: the query and
            value projections of attention).
    """
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise InputError(f"model {name!r} takes text, input_shape (tokens,); not {input_shape}.")
    if attention is not None:
        check_names("attention", [attention], ATTENTION)
    need_transformers()
    name = str(Path(name).expanduser()) if is_folder(name) else name
    source = Source(name, "model", "model: DIR")
    config = _config(source, pretrained)
    new: list[nn.Parameter] = []
    if pretrained:
        body, new = _pretrained(source, config, attention)
    else:
        body = _random(source, config, attention)
    if lora is not None:
        inject(body, name, lora, lora_alpha, lora_dropout, lora_targets)
        for parameter in new:
            parameter.requires_grad_()
    first, usual = _published(config)
    share = usual if dropout is None else dropout
    if not 0 <= share < 1:
        raise InputError(f"dropout must be at least 0 and below 1, got {share}.")
    width, spread = int(config.hidden_size), float(getattr(config, "initializer_range", 0.02))
    features = Encoder(body, _started(nn.Linear(width, width), spread) if first else None)
    _check_length(name, body, input_shape[0])
    with all_called(name, body):
        _check_reads(name, features)
    head: list[nn.Module] = [nn.Dropout(share), _started(nn.Linear(width, classes or 1), spread)]
    if classes is None:
        head.append(nn.Flatten(start_dim=0))
    return FeatureModel(features, nn.Sequential(*head)).train()


def _published(config: Any) -> tuple[bool, float]:
    """Whether the published classifier has a layer of its own before the last, and its dropout."""
    if config.model_type == "distilbert":
        return True, float(config.seq_classif_dropout)
    own = getattr(config, "classifier_dropout", None)
    return False, float(getattr(config, "hidden_dropout_prob", 0.1) if own is None else own)


def _started(layer: nn.Linear, spread: float) -> nn.Linear:
    nn.init.normal_(layer.weight, std=spread)
    nn.init.zeros_(layer.bias)
    return layer


def _pretrained(source: Source, config: Any, attention: str | None) -> tuple[nn.Module, list[nn.Parameter]]:
    """The encoder, and those of its parameters that are not in the weights."""
    import transformers

    weights, kind = source.weights(), cast(Any, transformers.MODEL_MAPPING[type(config)])

    def load() -> tuple[Any, Mapping[str, Any]]:
        with _quiet():
            found: tuple[Any, Mapping[str, Any]] = kind.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                output_loading_info=True,
                attn_implementation=attention,
            )
        return found

    model, info = source.attempt(load)
    lacking = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if lacking:
        raise InputError(
            f"the weights of {source.name!r} lack {len(lacking)} of the model's, such as {lacking[0]!r}: "
            "they belong to a different model than config.json. For random weights, set "
            "pretrained to false in model_options."
        )
    encoder: nn.Module = model.float()
    return encoder, [p for n, p in encoder.named_parameters() if n in info["missing_keys"]]


def _random(source: Source, config: Any, attention: str | None) -> nn.Module:
    import transformers

    made: nn.Module = source.attempt(
        lambda: transformers.AutoModel.from_config(config, attn_implementation=attention)
    )
    return made


def _config(source: Source, pretrained: bool) -> Any:
    import transformers

    if source.name in CONFIGURATIONS and source.folder is None and not pretrained:
        return getattr(transformers, CONFIGURATIONS[source.name])()
    return source.config()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars, and its notes on weights that an encoder does not need."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _check_length(name: str, body: nn.Module, tokens: int) -> None:
    """Refuses texts of more tokens than the model has places for."""
    config: Any = body.config
    most = getattr(config, "max_position_embeddings", None)
    for part, module in body.named_modules():
        # RoBERTa and its kin count places from behind the padding's.
        if part.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            most = module.num_embeddings - int(module.padding_idx) - 1
    if most is not None and tokens > most:
        raise InputError(f"model {name!r} takes {most} tokens, not {tokens}; set max_tokens in data_options.")


def _check_reads(name: str, features: Encoder) -> None:
    """Refuses what is no encoder of text, and models whose first token sees none of the others."""
    ids = torch.tensor([[2, 2, 2, 2], [2, 2, 2, 3]])
    mode = features.training
    try:
        with torch.no_grad():
            one, other = features.eval()({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model {name!r} is not a text encoder: {first}") from error
    finally:
        features.train(mode)
    if torch.equal(one, other):
        raise InputError(
            f"model {name!r} is a left-to-right model: its first token has no information about the text. "
            "Use an encoder, such as BERT."
        )


class Encoder(nn.Module):
    """From token ids and a mask to one vector a text: its first token's state, as the published classifier
    takes it.
    """

    def __init__(self, body: nn.Module, layer: nn.Linear | None) -> None:
        super().__init__()
        self.body = body
        self.layer = layer

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        if not isinstance(x, Mapping) or "input_ids" not in x or "attention_mask" not in x:
            raise InputError(
                f"a text model takes a mapping with input_ids and attention_mask, not {_what(x)}."
            )
        seen = self.body(input_ids=x["input_ids"], attention_mask=x["attention_mask"])
        if self.layer is None and (pooled := getattr(seen, "pooler_output", None)) is not None:
            found: Tensor = pooled
            return found
        state: Tensor = seen.last_hidden_state[:, 0]
        return state if self.layer is None else self.layer(state).relu()


def _what(x: Any) -> str:
    return ", ".join(x) if isinstance(x, Mapping) else type(x).__name__
