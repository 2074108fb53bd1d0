"""Logits of more rows than a step draws from, computed later and piece by piece from the last hidden states of the step.

The output layer, and whatever a family does to its logits (scaling, caps), is the model's own: for as long as a piece takes,
its decoder is replaced by one that returns the kept states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from baton.core.errors import InvariantViolated


class _KeptStates(torch.nn.Module):
    """In place of a decoder: returns what that has returned."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_arguments: object, **_named: object) -> object:
        return self._output


class FinalHidden:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._name = str(model.base_model_prefix)
        self._decoder = model.get_submodule(self._name)
        self._decoder.register_forward_hook(self._note)
        self._keeps = False
        self._output: object = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The states of the forward pass inside are kept until `drop`. A replayed graph has none."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def drop(self) -> None:
        self._output = None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary]; `rows` are those of the packed step."""
        if self._output is None:
            raise InvariantViolated("no hidden states were kept in this step")
        setattr(self._model, self._name, _KeptStates(self._output))
        try:
            ids = torch.zeros((1, 1), dtype=torch.int64, device=rows.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False, logits_to_keep=rows).logits[0]
        finally:
            setattr(self._model, self._name, self._decoder)
        return logits

    def _note(self, _module: torch.nn.Module, _arguments: object, output: object) -> None:
        if self._keeps:
            self._output = output
