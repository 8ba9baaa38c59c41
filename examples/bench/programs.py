"""The programs that the benchmark knows, and how each is run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PAPER, MICRO = "paper", "micro"


class Training(NamedTuple):
    """A model ready to be trained.

    Attributes:
        step: takes a batch, trains on it, returns the loss.
        batches: what to train on, over and over; each a tuple of arguments.
        variables: gives all variables that training changes, the optimizer's included.
    """

    step: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]
    variables: Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Program:
    """A row of the table.

    Attributes:
        name: what `--programs` calls it.
        title: what the table calls it.
        group: PAPER or MICRO.
        steps: how many steps a timed block has, unless `--steps` says otherwise.
        warm_up: steps before the first block; more where Terra has many ways to learn.
        tolerance: how far Terra's losses may be from eager's during the warm-up, relative to them;
            0 asks for equal bits of all losses and variables. Only convolutions need one: in
            graphs, oneDNN computes some of them in another way.
    """

    name: str
    title: str
    group: str
    steps: int = 10
    warm_up: int = 40
    tolerance: float = 0.0

    def build(self) -> Training:
        """Makes the model; the seeds have to be set before."""
        if self.group == MICRO:
            module = importlib.import_module("examples.micro")
            return Training(*getattr(module, self.name.replace("-", "_"))())
        scripts = str(Path(__file__).parent.parent / "paper")
        if scripts not in sys.path:
            sys.path.insert(0, scripts)
        return Training(*importlib.import_module(self.name.replace("-", "_")).build())


_ONEDNN = 1e-4

PROGRAMS = (
    Program("dropblock", "DropBlock", PAPER, tolerance=_ONEDNN),
    Program("sdpoint", "SDPoint", PAPER, warm_up=80, tolerance=_ONEDNN),
    Program("music-transformer", "Music Transformer", PAPER),
    Program("bert-classification", "BERT classification", PAPER, warm_up=80),
    Program("bert-qa", "BERT Q&A", PAPER, warm_up=80),
    Program("gpt2", "GPT-2", PAPER),
    Program("dcgan", "DCGAN", PAPER, tolerance=_ONEDNN),
    Program("resnet50", "ResNet-50", PAPER, tolerance=_ONEDNN),
    Program("faster-rcnn", "Faster R-CNN", PAPER, tolerance=_ONEDNN),
    Program("yolov3", "YOLOv3", PAPER, warm_up=80, tolerance=_ONEDNN),
    Program("raw-mlp", "raw TF MLP, SGD", MICRO, steps=60),
    Program("keras-mlp", "Keras MLP, Adam", MICRO, steps=30),
    Program("lstm-loop", "raw TF LSTM loop, SGD", MICRO, steps=20),
    Program("transformer", "Transformer block, AdamW", MICRO, steps=20),
    Program("cnn", "Keras CNN, SGD momentum", MICRO, steps=30, tolerance=_ONEDNN),
)


def choose(names: str | None) -> list[Program]:
    """The programs of that names, with commas between; a group's name stands for all of it.

    Raises:
        ValueError: there is no such program; the text says which there are.
    """
    if names is None:
        return list(PROGRAMS)
    chosen: dict[str, Program] = {}
    unknown = []
    for name in names.split(","):
        found = [program for program in PROGRAMS if name in (program.name, program.group)]
        chosen.update((program.name, program) for program in found)
        if not found:
            unknown.append(name)
    if unknown:
        known = ", ".join(program.name for program in PROGRAMS)
        raise ValueError(f"no program {', '.join(unknown)}; there are: {known}; or paper, micro")
    return list(chosen.values())
