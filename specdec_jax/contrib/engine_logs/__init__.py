"""Logs of other engines, read as traces, and advice on drafting from them (docs/advice.md)."""

from specdec_jax.contrib.engine_logs.advice import advise as advise
from specdec_jax.contrib.engine_logs.advice import engine_options as engine_options
from specdec_jax.contrib.engine_logs.published import costs_named as costs_named
from specdec_jax.contrib.engine_logs.readers import log_of_trace as log_of_trace
from specdec_jax.contrib.engine_logs.readers import read_log as read_log
