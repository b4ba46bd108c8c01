"""Honest: a rule that reads the running entropy of the monitor `phases`."""

from specdec_jax.stopping import static


def reads_entropy():
    def check(state, distribution, drafted, context):
        return context.monitor.entropy < 2.0, state

    return static().replace(check=check, reads=frozenset({"phases"}))
