"""DistilBERT, BERT and other encoders of text as a :class:`~shoal.models.FeatureModel`, by transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from shoal.data.text import from_hub, is_folder
from shoal.errors import InputError, check_names
from shoal.models.feature_model import FeatureModel
from shoal.models.lora import Alpha, Dropout, Rank, all_called, inject
from shoal.settings import Range
from shoal.vision import load

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
    dropout: Annotated[float, Range(0, below=1)] | None = None,
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
        pretrained: use the published weights, or those in the folder; otherwise random ones. Only safetensors
            are read, and code that comes with a model is not executed.
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
    body, new = _encoder(name, pretrained, attention)
    config: Any = body.config
    if lora is not None:
        inject(body, name, lora, lora_alpha, lora_dropout, lora_targets)
        for parameter in new:
            parameter.requires_grad_()
    width, deviation = int(config.hidden_size), float(getattr(config, "initializer_range", 0.02))
    usual: Any = getattr(config, "classifier_dropout", None)
    usual = getattr(config, "hidden_dropout_prob", 0.1) if usual is None else usual
    layer = None
    if config.model_type == "distilbert":  # whose published classifier has a layer of its own before the last
        usual, layer = config.seq_classif_dropout, _initialized(nn.Linear(width, width), deviation)
    features = Encoder(body, layer)
    if (most := _most_tokens(body)) < input_shape[0]:
        raise InputError(
            f"model {name!r} takes {most} tokens, not {input_shape[0]}; set max_tokens in data_options."
        )
    with all_called(name, body):
        _check_reads(name, features)
    rate: float = usual if dropout is None else dropout
    head = [nn.Dropout(rate), _initialized(nn.Linear(width, classes or 1), deviation)]
    if classes is None:
        head.append(nn.Flatten(start_dim=0))
    return FeatureModel(features, nn.Sequential(*head)).train()


def read_model(name: str, config: Any, optional: str | None = None) -> tuple[Any, list[nn.Parameter]]:
    """A model of transformers with its published weights, in float32; and its parameters without any.

    These are refused unless ``optional`` is in their names. Only safetensors are read.
    """
    transformers = load("transformers", "text")

    def read(name: str, **options: Any) -> tuple[Any, list[nn.Parameter]]:
        options |= {"config": config, "output_loading_info": True, "use_safetensors": True}
        model, info = transformers.AutoModel.from_pretrained(name, **options)
        lacking = sorted(key for key in info["missing_keys"] if optional is None or optional not in key)
        if lacking:
            raise ValueError(
                f"its weights lack {len(lacking)} of the model's, such as {lacking[0]!r}: they belong to a "
                "different model than config.json"
            )
        return model.float(), [p for n, p in model.named_parameters() if n in info["missing_keys"]]

    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # of weights that are not needed
    logging.disable_progress_bar()
    try:
        return from_hub("model", name, read)
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _encoder(name: str, pretrained: bool, attention: str | None) -> tuple[Any, list[nn.Parameter]]:
    """The encoder of transformers, and those of its parameters that are not in the weights."""
    transformers = load("transformers", "text")
    if name in CONFIGURATIONS and not is_folder(name) and not pretrained:
        config = getattr(transformers, CONFIGURATIONS[name])()
    else:
        config = from_hub("model", name, transformers.AutoConfig.from_pretrained)
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if config.model_type not in kinds:  # a wrapper of another library might read any file that it names
        raise InputError(f"model {name!r} is not a text encoder but of the type {config.model_type!r}.")
    asked = getattr(config, "_attn_implementation", None)
    if attention is None and asked not in (None, *ATTENTION):
        raise InputError(
            f"model {name!r} requires code of others, attention {asked!r}, which is not executed."
        )
    config._attn_implementation = attention
    if pretrained:
        return read_model(name, config, "pooler")
    return from_hub("model", name, lambda name, **_: (transformers.AutoModel.from_config(config), []))


def _initialized(layer: nn.Linear, deviation: float) -> nn.Linear:
    nn.init.normal_(layer.weight, std=deviation)
    nn.init.zeros_(layer.bias)
    return layer


def _most_tokens(body: nn.Module) -> float:
    """How many positions the model has; RoBERTa and its kin count them from behind the padding's."""
    config: Any = body.config
    tables = [m for n, m in body.named_modules() if n.endswith("position_embeddings")]
    own = [m.num_embeddings - (m.padding_idx or -1) - 1 for m in tables if isinstance(m, nn.Embedding)]
    return min(own, default=getattr(config, "max_position_embeddings", None) or math.inf)


def _check_reads(name: str, features: nn.Module) -> None:
    """Refuses what is no encoder of text, and models whose first token sees none of the others."""
    ids = torch.tensor([[2, 2, 2, 2], [2, 2, 2, 3]])
    try:
        with torch.no_grad():
            first, second = features.eval()({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model {name!r} is not a text encoder: {why}") from error
    if torch.equal(first, second):
        raise InputError(
            f"model {name!r} is a left-to-right model: its first token has no information about the text. "
            "Use an encoder, such as BERT."
        )


class Encoder(nn.Module):
    """From token ids and a mask to one vector per text: its first token's state, as the published classifier
    takes it.
    """

    def __init__(self, body: nn.Module, layer: nn.Linear | None) -> None:
        super().__init__()
        self.body = body
        self.layer = layer

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        if not isinstance(x, Mapping) or not {"input_ids", "attention_mask"} <= set(x):
            what = ", ".join(x) if isinstance(x, Mapping) else type(x).__name__
            raise InputError(f"a text model takes a mapping with input_ids and attention_mask, not {what}.")
        try:
            output = self.body(input_ids=x["input_ids"], attention_mask=x["attention_mask"])
        except IndexError as error:
            config: Any = self.body.config
            raise InputError(
                f"the tokenizer gives the token {int(x['input_ids'].max())}, and the model has "
                f"{config.vocab_size:,}: they do not belong together."
            ) from error
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        if self.layer is None and pooled is not None:
            return pooled
        state: Tensor = output.last_hidden_state[:, 0]
        return state if self.layer is None else self.layer(state).relu()
