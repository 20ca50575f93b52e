"""List how to read the residual stream after a layer from SGLang's model classes.

patches/step/targets.py reads it for drafters. This module uses only the names and the
source files of the classes, before a server loads any weight.
"""

from __future__ import annotations

import inspect
import logging
import re
from importlib import import_module
from pathlib import Path

from sglang_dspark.serving import upstream

logger = logging.getLogger(__name__)

# The hooks that `configure_aux_hidden_state_capture` calls (sglang/srt/model_executor/
# model_runner_components/attention_backend_setup.py).
FEATURE_HOOKS = ("set_dspark_layers_to_capture", "set_dflash_layers_to_capture")
EAGLE3_HOOK = "set_eagle3_layers_to_capture"
# Classes whose hook of EAGLE-3 returns a part of the stream (sgl-project/sglang#39286).
INCOMPLETE = frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})

# Classes whose layers return two tensors. Those of the first set leave the sum to the next norm;
# those of the second have added, and also return the layer's input. To add a class, compare
# it with Transformers' hidden states in tests/patches/test_target_features.py, as for these.
SUMMED = frozenset({"Ernie4_5_ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM"})
WHOLE = frozenset({"StableLmForCausalLM"})
_PAIRS = re.compile(r"hidden_states, residual = (layer|self\.layers\[\w+\])\(")


def returns_features(architecture: str) -> bool:
    """Return whether features of layers can be read from SGLang's class of an architecture.

    True for a class that is not SGLang's own: that is decided when it is built.
    Imports the class if its own file does not suffice: SGLang's registry imports all models, about
    4 s, and one class needs half a second.
    """
    if not architecture or upstream.envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get():  # may have another
        return True
    models = import_module("sglang.srt.models")
    for file in sorted(file for folder in models.__path__ for file in Path(folder).glob("*.py")):
        text = file.read_text()
        if f"\nclass {architecture}(" not in text:
            continue
        if _reads(text, architecture):
            return True
        try:
            found = getattr(import_module(f"{models.__name__}.{file.stem}"), architecture)
        except Exception as error:  # SGLang's registry logs it, and refuses the model
            logger.debug("%s is not importable: %s", file, error)
            return True
        bases = [base for base in inspect.getmro(found)[1:] if base.__module__ != found.__module__]
        ours = [base for base in bases if base.__module__.startswith(models.__name__)]
        return any(_reads(Path(inspect.getfile(base)).read_text(), base.__name__) for base in ours)
    return True


def _reads(text: str, name: str) -> bool:
    """Return whether a model's source has a hook, or layers of a known form."""
    hooks = FEATURE_HOOKS if name in INCOMPLETE else (*FEATURE_HOOKS, EAGLE3_HOOK)
    if any(f"def {hook}" in text for hook in hooks):
        return True
    known = not _PAIRS.search(text) or name in SUMMED | WHOLE
    parts = ("self.layers", "self.logits_processor", "self.lm_head")  # drafts share the LM head
    return known and all(part in text for part in parts)
