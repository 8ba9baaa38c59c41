"""Tests of `terra run`, `terra explain`, Keras and Horovod loops: programs left as they are."""
