"""Every model type of the installed transformers library, tiny and random, under dilated attention: what runs, what is refused.

python -m tests.hub.transformers.survey            compares with what is kept (many minutes)
python -m tests.hub.transformers.survey --keep     keeps it in model_types.json, from which docs/families.md is made
python -m tests.hub.transformers.survey bert vit   shows some
"""

import contextlib
import inspect
import itertools
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from flexdilated import DilatedPattern
from flexdilated.hub.transformers import patterns, set_pattern
from tests.hub.transformers.sizes import FIELDS, LONGEST, NARROW, OWN_INPUTS, OWN_SIZES, SIZES, SPARSER, WINDOWS, draw

KEPT = Path(patterns.__file__).with_name("model_types.json")
DENSE, DILATED = DilatedPattern((1 << 20,), (1,)), DilatedPattern((5, 13), (1, 3))
SECONDS = 240  # of the processor, which is slower beside other work, for one type: what takes longer was not tried
TOLERANCE = {"atol": 2e-4, "rtol": 1e-3}  # float32, in which some of the library's models compute whatever they are asked for


RESULTS = {
    "runs": "equal to dense attention under a dense pattern, and otherwise under another",
    "runs with": "the same with some fields set",
    "refused": "with an error that says why",
    "parts": "made of models that are types of their own, each with its own pattern",
    "not tried": "no tiny model was built and run, not even dense",
    "fault": "none of these: an error from elsewhere, or a wrong output",
}


class Finding(NamedTuple):
    """What was seen of a model type, one of `RESULTS`, and why."""

    result: str
    why: str = ""


class Late(BaseException):
    """A model takes too long."""


def survey(model_type: str) -> Finding:
    with _deadline():
        try:
            return _survey(model_type)
        except Late:
            return Finding("not tried", f"took more than {SECONDS} s")


def _survey(model_type: str) -> Finding:
    config_class, model_class = CONFIG_MAPPING[model_type], _model_class(model_type)
    if model_class is None:
        return Finding("not tried", "the library has a name for it and no model")
    try:
        default = config_class()
    except Exception as error:
        return Finding("not tried", _shown(error))
    refusal = _refusal(config_class)
    if isinstance(refusal, NotImplementedError) and _raised_in(refusal).endswith("patterns.py"):
        return Finding("refused", _shown(refusal))
    parts = [name for name in default.sub_configs if isinstance(getattr(default, name, None), PreTrainedConfig)]
    if parts:
        is_refused = isinstance(refusal, ValueError) and "config must be that of one part" in str(refusal)
        made_of = ", ".join(f"{name}: {getattr(default, name).model_type}" for name in sorted(parts))
        return Finding("parts", made_of if is_refused else f"{made_of}; what is its own was not tried")
    errors: list[Exception] = []
    found = next(_dense_runs(model_type, default, errors), None)
    if found is None:
        return Finding("not tried", _shown(errors[0]) if errors else "nothing is known of its inputs")
    sizes, inputs, expected = found
    # The library's own windows are longer than these inputs: what they hide shows in narrow ones.
    known = _known_fields(default)
    narrow = {name: NARROW for name in WINDOWS if isinstance(known.get(name), int)}
    finding = _compare(config_class, model_class, sizes, inputs, expected, narrow)
    if finding.result != "refused":
        return finding
    last = finding
    # Which of the fields that turn off what a pattern does not have are enough; with all of them it is refused for what is left.
    fields = [name for name in known if name in narrow or name not in WINDOWS]
    for count in range(1, len(fields) + 1):
        for some in itertools.combinations(fields, count):
            changed = {name: FIELDS[name] for name in some}
            with contextlib.suppress(Exception):
                # Of the dense model no window is changed, and no type of layer: to have the same outputs is to be the same model.
                others = {name: value for name, value in changed.items() if name not in WINDOWS}
                dense = _run(build(config_class, model_class, sizes, None, others), inputs)
                other = _compare(config_class, model_class, sizes, inputs, dense, narrow | changed)
                if other.result == "runs":
                    shown = ", ".join(f"{name}={'LONGEST' if value is LONGEST else value}" for name, value in changed.items())
                    return Finding("runs with", f"{shown}: {finding.why}")
                last = other
    return last


def _dense_runs(model_type: str, default: Any, errors: list[Exception]) -> Iterator[tuple[dict[str, Any], dict[str, Any], Tensor]]:
    """Sizes and inputs with which the dense model runs, and what it gives; errors of others are added to a list."""
    for sizes in attempts(model_type, default):
        try:
            model = build(type(default), _model_class(model_type), sizes, None)
            for inputs in inputs_of(model_type, model):
                try:
                    yield sizes, inputs, _run(model, inputs)
                except Exception as error:
                    errors.append(error)
        except Exception as error:
            errors.append(error)


def _known_fields(config: Any) -> dict[str, Any]:
    found = {}
    for name in FIELDS:
        with contextlib.suppress(AttributeError, RuntimeError):  # the last where a field has a value for each layer
            found[name] = getattr(config, name)
    return found


def _compare(
    config_class: Any, model_class: Any, sizes: dict[str, Any], inputs: dict[str, Any], expected: Tensor, fields: dict[str, Any]
) -> Finding:
    try:
        out = _run(build(config_class, model_class, sizes, DENSE, fields), inputs)
        other = _run(build(config_class, model_class, sizes, DILATED, fields), inputs)
    except Exception as error:
        is_ours = f"{os.sep}flexdilated{os.sep}" in _raised_in(error) and isinstance(
            error, ValueError | TypeError | NotImplementedError
        )
        return Finding("refused" if is_ours else "fault", _shown(error))
    if out.shape != expected.shape or not torch.allclose(out, expected, **TOLERANCE):
        return Finding("fault", "differs from dense attention under a dense pattern")
    if not (other - expected).abs().max() > 1e-6:
        return Finding("refused", patterns.unreached(model_class.__name__))
    return Finding("runs")


def _refusal(config_class: Any) -> Exception | None:
    """What setting a pattern in a config raises."""
    try:
        set_pattern(config_class(), DENSE)
    except Exception as error:
        return error
    return None


def attempts(model_type: str, default: Any) -> Iterator[dict[str, Any]]:
    """Sizes to try: tiny, tiny in other proportions, and at last the library's own with fewer layers and experts."""
    known = default.to_dict()
    own = OWN_SIZES.get(model_type, {})

    def fitting(sizes: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in sizes.items() if name in known and isinstance(known[name], int | None)}

    for sizes in (SIZES | _layers(default), SIZES, *({**SIZES, **other} for other in SPARSER)):
        yield fitting(sizes) | _roped(known, fitting(sizes)) | own
    few = {name: value for name, value in fitting(SIZES).items() if "layer" in name or "expert" in name or name == "vocab_size"}
    yield few | own


def _layers(default: Any) -> dict[str, Any]:
    kinds = getattr(default, "layer_types", None)
    if not kinds:
        return {}
    return {"num_hidden_layers": min(8, 1 + max(kinds.index(kind) for kind in set(kinds)))}


def _roped(known: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions in several sections, which must fill the head dim."""
    rope = known.get("rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    head_dim = sizes.get("head_dim") or sizes.get("hidden_size", 48) // sizes.get("num_attention_heads", 6)
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    first = half - 2 * (half // 3)
    return {"rope_parameters": {**rope, "mrope_section": [first, half // 3, half // 3]}}


def inputs_of(model_type: str, model: Any) -> Iterator[dict[str, Any]]:
    if model_type in OWN_INPUTS:
        yield OWN_INPUTS[model_type](model.config)
        return
    names = [name for name in inspect.signature(model.forward).parameters if name not in ("self", "args", "kwargs")]
    parameters = inspect.signature(model.forward).parameters
    needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    main = [] if model.main_input_name in needed or model.main_input_name not in names else [model.main_input_name]
    more = [[], ["decoder_input_ids"], ["bbox"], ["attention_mask"], ["input_features_mask"], ["input_ids"]]
    for others in more:
        wanted = [*main, *needed, *(name for name in others if name in names)]
        if len(others) and others[0] not in names:
            continue
        yield from draw(wanted, model.config)


def _model_class(model_type: str) -> Any:
    name = MODEL_MAPPING_NAMES[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0], None)


def build(
    config_class: Any, model_class: Any, sizes: dict[str, Any], pattern: DilatedPattern | None, fields: dict[str, Any] | None = None
) -> Any:
    config = config_class(**sizes)
    for name, value in (fields or {}).items():
        setattr(config, name, value)
    if pattern is not None:
        set_pattern(config, pattern)
    torch.manual_seed(0)
    model = model_class(config).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():  # zeros would hide what attention does
        if parameter.is_floating_point():
            nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 0.5, std=0.1)
    return model


def _run(model: Any, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(2)
    with torch.no_grad():
        output = model(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()})
    tensors = [output] if isinstance(output, Tensor) else [*_tensors(output.to_tuple())]
    out = getattr(output, "last_hidden_state", None)
    out = max(tensors, key=Tensor.is_floating_point) if out is None else out  # the first, but before it what is no code
    if not bool(out.isfinite().all()):
        raise ValueError("its outputs are not finite")
    return out


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _raised_in(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].filename


def _shown(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    named = text if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {text}"
    return named if len(named) <= 200 else named[:197] + "..."


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def version() -> str:
    return json.loads(KEPT.read_text())["transformers"]


def kept() -> dict[str, Finding]:
    return {name: Finding(*values) for name, values in json.loads(KEPT.read_text())["types"].items()}


def write(findings: dict[str, Finding]) -> None:
    others = json.loads(KEPT.read_text())["other types"]
    types, others = (_rows(rows) for rows in (findings, others))
    KEPT.write_text(f'{{\n  "transformers": "{transformers.__version__}",\n  "types": {types},\n  "other types": {others}\n}}\n')


def _rows(rows: dict[str, Any]) -> str:
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps([*row])}" for name, row in sorted(rows.items()))
    return f"{{\n{lines}\n  }}"


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    keep = "--keep" in names
    names = [name for name in names if not name.startswith("--")]
    found = {}
    for name in names or sorted(MODEL_MAPPING_NAMES):
        found[name] = survey(name)
        if names:
            print(name, *found[name])
    if keep:
        write(found if not names else {**kept(), **found})
        return 0
    different = {name for name, finding in found.items() if kept().get(name) != finding}
    for name in sorted(different):
        print(f"{name}: {found[name]}, kept {kept().get(name)}")
    return len(different) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
