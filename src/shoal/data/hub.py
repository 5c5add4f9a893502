"""Encoders of text and their tokenizers from folders and from the Hub, neither of which is trusted.

transformers follows much that a model's files name: classes, paths, code, kernels to fetch. So it is shown
none of them. Of ``config.json`` it gets the numbers and short words that a known architecture declares, of
weights tensors from safetensors, and of a tokenizer copies of the files that hold vocabulary.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import InputError
from shoal.files import check_regular, read_bytes, read_json
from shoal.vision import allow_torchvision

T = TypeVar("T")

ENCODERS = {
    **{"albert": "Albert", "bert": "Bert", "big_bird": "BigBird", "camembert": "Camembert"},
    **{"data2vec-text": "Roberta", "deberta": "Deberta", "deberta-v2": "DebertaV2"},
    **{"distilbert": "DistilBert", "electra": "Electra", "ernie": "Bert", "ibert": "Roberta"},
    **{"longformer": "Longformer", "megatron-bert": "Bert", "mobilebert": "MobileBert", "modernbert": ""},
    **{"mpnet": "MPNet", "rembert": "RemBert", "roberta": "Roberta"},
    **{"roberta-prelayernorm": "Roberta", "roformer": "RoFormer", "squeezebert": "SqueezeBert"},
    **{"xlm-roberta": "XLMRoberta", "xlm-roberta-xl": "XLMRoberta"},
}
"""Architectures of transformers that are built, and what their tokenizers' classes are called."""
TOKENIZERS = {"", "PreTrainedTokenizerFast", "TokenizersBackend"} | {
    f"{name}Tokenizer{fast}"
    for name in {*ENCODERS.values(), "Barthez", "Herbert"}
    if name
    for fast in ("", "Fast")
}
LEGACY = {"global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "pooler_hidden_size"}
"""What newer transformers take and no longer declare."""
OF_ALL = {f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")} | {"tie_word_embeddings"}
"""What every configuration has that counts for an encoder; the rest of it is for other uses."""
WIDEST, DEEPEST = 2**22, 1000
"""Above any number in an encoder's configuration, such as the size of its vocabulary; and of layers."""
WORD = re.compile(r"[\w |.-]{0,60}", re.ASCII)

INDEX = "model.safetensors.index.json"
PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
VOCABULARIES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model"),
    *("bpe.codes", "sentencepiece.model"),
)
OTHERS = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
LARGEST = 2**28
"""Bytes of a file of a tokenizer."""
SWITCHES = (
    *("do_lower_case", "do_basic_tokenize", "tokenize_chinese_chars", "strip_accents", "add_prefix_space"),
    *("trim_offsets", "keep_accents", "remove_space", "split_by_punct", "clean_up_tokenization_spaces"),
    *("use_fast", "add_bos_token", "add_eos_token", "model_max_length", "padding_side", "truncation_side"),
    *("errors", "vocab_type", "unk_id"),
)
"""What is taken of ``tokenizer_config.json``, beside special tokens."""
TOKEN = {"content", "single_word", "lstrip", "rstrip", "normalized", "special", "__type"}


def need_transformers() -> None:
    allow_torchvision()
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise InputError("text models require transformers: pip install 'shoal[text]'.") from None


def is_folder(name: str) -> bool:
    """Whether a model's name is that of a model's folder here, or can be nothing but a path."""
    return (
        name.startswith((".", "~")) or Path(name).is_absolute() or os.path.isfile(Path(name, "config.json"))
    )


class Source:
    """A model's files by name: those in a folder, or those of a repository of the Hub.

    Of the latter, files that were fetched before are taken first and then the network is asked.
    """

    def __init__(self, name: str, what: str, option: str) -> None:
        self.name, self.what, self.option = name, what, option
        self.folder = Path(name).expanduser() if is_folder(name) else None
        self.failure = (
            f"the {what} {'in' if self.folder else 'of'} {str(self.folder or name)!r} cannot be loaded"
        )

    def found(self, file: str, fetch: bool = True) -> Path | None:
        """Where a file is, if it is anywhere."""
        if self.folder is not None:
            path = self.folder / file
            check_regular(path)
            return path if path.is_file() else None
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.utils import EntryNotFoundError

        cached = self.attempt(lambda: try_to_load_from_cache(self.name, file))
        if isinstance(cached, str):
            return Path(cached)
        if cached is not None or not fetch:  # it is known that there is none
            return None
        if not self._online:
            raise InputError(
                f"{self.failure}: it is not on this machine and there is no network; {self._advice}."
            )
        try:
            return Path(self.attempt(lambda: hf_hub_download(self.name, file), self._advice))
        except InputError as error:
            if isinstance(error.__cause__, EntryNotFoundError):
                return None
            raise

    def attempt(self, action: Callable[[], T], advice: str = "") -> T:
        """What ``action`` gives, and an InputError for whatever is wrong with the files."""
        try:
            return action()
        except (KeyboardInterrupt, SystemExit, InputError):
            raise
        except BaseException as error:  # transformers and safetensors have their own; tokenizers panics
            first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InputError(f"{self.failure} ({first[:200]}){advice and '; '}{advice}.") from error

    def config(self) -> Any:
        """The configuration of an encoder, made of what is allowed in ``config.json``."""
        path = self.found("config.json")
        if path is None:
            raise self._no("config.json")
        content = self.attempt(lambda: _mapping(path))
        return self.attempt(lambda: configuration(content, self.failure))

    def weights(self) -> dict[str, Any]:
        """All tensors; none are unpickled."""
        from safetensors.torch import load_file

        path = self.found("model.safetensors")
        paths = [path] if path is not None else [self._part(name) for name in self._parts()]
        result: dict[str, Any] = {}
        for one in paths:
            result |= self.attempt(lambda one=one: load_file(one))  # type: ignore[misc]
        return result

    def _parts(self) -> Sequence[str]:
        index = self.found(INDEX)
        if index is None:
            raise InputError(f"{self.failure}: it has no model.safetensors; other weight files are not read.")
        names = self.attempt(lambda: sorted(set(_mapping(index)["weight_map"].values())))
        if not all(isinstance(name, str) and PART.fullmatch(name) for name in names):
            raise InputError(f"{self.failure}: {INDEX} refers to files other than parts of the weights.")
        return names

    def _part(self, name: str) -> Path:
        path = self.found(name)
        if path is None:
            raise InputError(f"{self.failure}: there is no {name!r}.")
        return path

    def tokenizer(self) -> Any:
        """The tokenizer, made of copies of its files without what names classes, paths or templates."""
        from transformers import AutoTokenizer

        names = [name for name in VOCABULARIES if self.found(name, fetch=False)]
        fetch = not names
        paths = {name: self.found(name, fetch) for name in (*(names or VOCABULARIES), *OTHERS, "config.json")}
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "tokenizer")
            place.mkdir()
            for name, path in paths.items():
                if path is not None:
                    self.attempt(lambda name=name, path=path: _copy(name, path, place))  # type: ignore[misc]
            if not any((place / name).exists() for name in VOCABULARIES):
                raise self._no("config.json" if paths["config.json"] is None else "tokenizer.json")
            safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            result = self.attempt(lambda: AutoTokenizer.from_pretrained(str(place), **safe))
        result.name_or_path = self.name  # and not that of the copies
        return result

    def _no(self, file: str) -> InputError:
        return InputError(
            f"there is no {str(Path(self.folder or self.name, file))!r}; a model's folder has config.json, "
            "model.safetensors, and the tokenizer's files."
        )

    @property
    def _advice(self) -> str:
        return f"use a folder with config.json, weights and tokenizer files: {self.option}"

    @cached_property
    def _online(self) -> bool:
        """Whether the models' host answers within seconds: its own library tries for a minute."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return False
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError):
            return False
        return True


def _mapping(path: Path) -> dict[str, Any]:
    content = read_json(path, LARGEST)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no mapping")
    return content


def configuration(content: Mapping[str, Any], failure: str) -> Any:
    """What transformers calls the configuration, of ``config.json``'s content.

    What the architecture does not declare is left out, since transformers keeps and follows whatever it is
    given.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    kind = content.get("model_type")
    if "auto_map" in content:
        raise InputError(f"{failure}: it requires custom code (auto_map), which is not executed.")
    if not isinstance(kind, str) or kind not in ENCODERS or kind not in CONFIG_MAPPING:
        raise InputError(
            f"{failure}: its architecture {str(kind)[:60]!r} is not a supported text encoder, such as "
            "bert, distilbert, roberta, deberta-v2 or modernbert."
        )
    made = CONFIG_MAPPING[kind]
    own = set(inspect.signature(made).parameters) | set(getattr(made, "attribute_map", {}))
    allowed = own - set(inspect.signature(PretrainedConfig).parameters) | OF_ALL | LEGACY
    taken = {key: value for key, value in content.items() if key in allowed}
    for key, value in taken.items():
        if not _plain(value, 2 if key.startswith("rope_") else 0) or (
            "layers" in key and isinstance(value, int) and value > DEEPEST
        ):
            raise InputError(
                f"{failure}: {key} in config.json is {repr(value)[:60]}; it must be a word or a number that "
                "is not too large for an encoder."
            )
    return made(**taken)


def _plain(value: Any, depth: int) -> bool:
    """Whether it is a number of usual size or a word, or a list of those, or a mapping where one may be."""
    if isinstance(value, dict):
        return depth > 0 and all(_plain(k, 0) and _plain(v, depth - 1) for k, v in value.items())
    if isinstance(value, list):
        return len(value) <= DEEPEST and all(_plain(v, 0) for v in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return WORD.fullmatch(value) is not None
    return value is None or (isinstance(value, int) and abs(value) <= WIDEST)


def _copy(name: str, path: Path, place: Path) -> None:
    """Puts what is allowed of a tokenizer's file into ``place``."""
    clean: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = {
        "config.json": _only_kind,
        "tokenizer_config.json": _tokenizer_config,
        "special_tokens_map.json": _special_tokens,
    }.get(name)
    if clean is not None:
        (place / name).write_text(json.dumps(clean(_mapping(path))), encoding="utf-8")
        return
    if name.endswith(".json"):
        _mapping(path)  # of usual nesting: Python's other readers of it may have no bound
    (place / name).write_bytes(read_bytes(path, LARGEST))


def _only_kind(content: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = content.get("model_type")
    return {"model_type": kind} if isinstance(kind, str) and kind in ENCODERS else {}


def _tokenizer_config(content: Mapping[str, Any]) -> Mapping[str, Any]:
    result = {k: v for k, v in content.items() if k in SWITCHES and _plain_or_long(v)}
    result |= _special_tokens(content)
    kind = content.get("tokenizer_class") or ""
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise InputError(f"its tokenizer_class is {str(kind)[:60]!r}, which is not supported.")
    if kind:
        result["tokenizer_class"] = kind
    tokens = content.get("added_tokens_decoder")
    if isinstance(tokens, dict):
        result["added_tokens_decoder"] = {
            key: _token(value) for key, value in tokens.items() if key.isdigit() and isinstance(value, dict)
        }
    return result


def _plain_or_long(value: Any) -> bool:
    """Lengths without a limit are written as numbers of thirty digits."""
    return _plain(value, 0) or (isinstance(value, int | float) and math.isfinite(value))


def _special_tokens(content: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens are texts, with how they are looked for."""
    result: dict[str, Any] = {}
    for key, value in content.items():
        if key.endswith("_token") and isinstance(value, str | dict):
            result[key] = _token(value)
        elif key == "additional_special_tokens" and isinstance(value, list):
            result[key] = [_token(one) for one in value if isinstance(one, str | dict)]
    return result


def _token(value: str | Mapping[str, Any]) -> str | dict[str, Any]:
    if isinstance(value, str):
        return value
    return {k: v for k, v in value.items() if k in TOKEN and isinstance(v, str | bool)}
