# `make test` and `make demo` need Python 3.11 or newer and nothing else: the environment is made in .venv.
PYTHON ?= python3
# Of `make demo`: dflash for the embedded Kimi K3, dspark for the embedded DeepSeek V4.1.
DRAFT ?= dflash
VENV := .venv
INSTALLED := $(VENV)/.installed

# Spinning OpenMP threads are many times slower as soon as another process uses the same cores.
export OMP_WAIT_POLICY := passive

.PHONY: install lint test demo clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,demo]'
	touch $@

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Two processes of one thread each: the tests are small, and a second thread brings them nothing.
test: lint
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadscope $(PYTEST_ARGS)

demo: $(INSTALLED)
	$(VENV)/bin/python -m examples.chitchat.demo --draft $(DRAFT)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
