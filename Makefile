# `make up` starts llmgw on this machine; `make test` checks it. Both need python3 (3.11 or newer), make and git.

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
# A thousand processes start in the tests, and none need compile what another has.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help up test lint soak pictures
help:
	@echo "make up          start llmgw here, on http://127.0.0.1:$(PORT)/ (another port: PORT=8123 make up)"
	@echo "make test        everything that must hold before a change goes in"
	@echo "make lint        the quick part of it"
	@echo "make soak        histories of faults for as long as it takes (once more: SEED=... make soak)"

up: .venv/ready
	@exec $(BIN)/python manage.py up --port $(PORT)

# Three on two cores: what waits for processes, databases and time-outs leaves room for a third.
DIVIDED := --numprocesses 3 --dist loadfile --no-loadscope-reorder
test: lint
	$(BIN)/python -m pytest $(DIVIDED) -m "not on_postgresql and not soak"
	LLMGW_TEST_DATABASE=postgresql $(BIN)/python -m pytest $(DIVIDED) -m "(django_db or lasting_database) and not (one_database or soak)"

# A hundred thousand steps, a hundred kills and an hour of whatever an engine may say, other ones each time; the seed
# is printed, and has a history that failed again.
SOAK_SECONDS ?= 3600
SEED ?= $(shell od -An -N3 -tu4 /dev/urandom)
soak: .venv/ready-for-tests
	SOAK_STEPS=100000 $(BIN)/python -m pytest --timeout 0 -m "hypothesis and not soak"
	SOAK_STEPS=100000 SOAK_KILLS=100 SOAK_SECONDS=$(SOAK_SECONDS) SOAK_SEED=$(strip $(SEED)) \
		$(BIN)/python -m pytest --timeout 0 -s \
		tests/test_plan_cluster.py tests/test_agent_kills.py tests/test_reconcile_drill.py tests/test_gateway_faults.py \
		tests/test_gateway_wire.py tests/test_gateway_visits.py tests/test_gateway_upstream_seams.py tests/test_agent_weights_peers.py \
		tests/test_bench_agent.py tests/test_bench_gateway.py tests/test_bench_passes.py \
		tests/test_bench_routing.py tests/test_bench_weights.py tests/test_agent_faults.py tests/test_door_streams.py \
		tests/test_catalog_import_speed.py::test_the_bench_runs \
		tests/test_nodes_bench_runs.py::test_a_bench_finds_what_an_engine_can_do \
		tests/test_nodes_bench_runs.py::test_the_generator_adds_less_than_a_millisecond tests/test_nodes_interview.py \
		tests/test_door_api_fuzz.py

# What the README shows, taken anew (with Debian's Chromium: apt-get install chromium).
pictures: .venv/ready-for-tests
	$(BIN)/python -m tests.browser.pictures

# Beside the types, which take the longest, there is time for all the rest, and for reading the tests once: those who
# run them find them compiled.
.PHONY: types style imports dangers settings readable
lint: .venv/ready-for-tests
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=recurse types style imports dangers settings readable

# The checks read settings that no variable of this shell has touched, and leave var/ alone.
CLEAN := env -i PATH="$$PATH" HOME="$$HOME" LLMGW_VAR=.venv/var-of-checks
types:
	$(CLEAN) $(BIN)/mypy
style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
imports:
	$(BIN)/lint-imports
dangers:
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive catalog nodes llmgw manage.py
settings:
	$(CLEAN) $(BIN)/python -W error manage.py check --deploy --fail-level WARNING
	$(CLEAN) $(BIN)/python -W error manage.py makemigrations --check --dry-run
readable:
	@$(BIN)/python -m pytest --collect-only -qq >.venv/tests || { cat .venv/tests; exit 1; }

# The stamps say what was installed, so that the second start is instant and a changed list is noticed.
.venv/ready: requirements.txt nodes/agent/requirements.txt .constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"llmgw needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try PYTHON=python3.11 make $(MAKECMDGOALS)" \
		% sys.version_info[:2])'
	@echo "Installing llmgw into .venv (once; a minute or two) ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) -r requirements.txt
	@touch $@

.venv/ready-for-tests: .venv/ready tests/requirements.txt
	@echo "Installing what the tests need into .venv (once; about 600 MB) ..."
	@$(PIP) -r tests/requirements.txt
	@touch $@
