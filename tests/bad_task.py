"""Tasks that fail, on all ranks or on one; tests copy this file to where ranks import it as a user's module."""

import dataclasses

import slackring as sr
from slackring.lab.tasks import load_task


def nan():
    task = load_task("digits")
    calls = []

    def loss(output, labels):
        calls.append(1)
        bad = sr.ring().rank == 1 and len(calls) > 20
        return task.loss(output, labels) * (float("nan") if bad else 1)

    return dataclasses.replace(task, loss=loss)


def no_model():
    task = load_task("digits")

    def model():
        if sr.ring().rank == 1:
            raise ValueError("no weights on this host")
        return task.model()

    return dataclasses.replace(task, model=model)


def broken():
    def loss(output, labels):
        raise ValueError("this loss is broken")

    return dataclasses.replace(load_task("digits"), loss=loss)
