# Everything a clone needs: Python 3.11 or newer and make. PYTHON names another interpreter than python3.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed
LIVE := $(VENV)/.live
ALL := $(VENV)/.all
TOOLS := $(VENV)/.tools
MYPYC := $(VENV)/.mypyc
# Modules are compiled as they are first imported, which most of torch, Ray and transformers never are. Where the
# environment forbids to keep that, every process of the tests would compile pandas, matplotlib and SciPy anew.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
NEED_TORCH := tests/live tests/unit/cli/test_live.py tests/unit/cli/test_validate.py
# a real server in real time: alone, since what runs beside it would be measured

.PHONY: real-engines real-clients help install demo demo-live test test-all test-rest test-wheel accelerated test-accelerated mutants mutants-sample bench bench-rust wheels docs lint style types types-of-the-wheel site format clean

help:
	@echo "make demo      set up, then simulate scenarios/bursty.yaml"
	@echo "make demo-live the same plus torch: calibrate a tiny model here, run it live, compare with the simulation"
	@echo "make test      set up, then the fast tests"
	@echo "make test-all  every test that needs no GPU; installs torch and Ray"
	@echo "make test-rest what of test-all make test has not run, but for what is judged by the clock; of the slow ones a share with DRAWN=1/12:seed, as .ci/run does"
	@echo "make test-wheel is what pip installs whole? In an empty environment, from another folder"
	@echo "make accelerated builds the accelerated wheel, compiled by mypyc, into build/: minutes, and a C compiler"
	@echo "make wheels    the accelerated wheels of a release, by cibuildwheel: on Linux it needs a container engine"
	@echo "make test-accelerated does what it holds leave the same records, and pass the tests of policies?"
	@echo "make mutants   plants every small fault in the simulator's core: which ones do the tests notice? An hour or two"
	@echo "make real-engines installs vLLM for CPUs into .vllm, 2 GB, for python -m tools.real_engines.judge"
	@echo "make real-clients installs clients and gateways of others, each into an environment of its own under .clients"
	@echo "make bench     speed and memory: a table, and results/bench.json"
	@echo "make bench-rust CPU time beside that of the Rust replay core of ai-dynamo-runtime, by the same requests"
	@echo "make docs      the documentation site, into build/site"
	@echo "make lint      ruff, pyright, mypy for the accelerated wheel and the site, as .ci/run does"
	@echo "make clean     remove the environment and the caches; results/ stays"

$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("batchsim needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --editable '.[test]'
	@touch $@

$(LIVE): $(RUNTIME)
	$(PIP) --editable '.[test,live-test]'
	@touch $@

$(ALL): $(LIVE)
	$(PIP) --editable '.[test,live-test,ray,engines,gateways]'
	@touch $@

$(TOOLS): $(ALL)
	$(PIP) --editable '.[dev]'
	@touch $@

install: $(RUNTIME)

demo: $(RUNTIME)
	$(BIN)/batchsim run scenarios/bursty.yaml

demo-live: $(LIVE)
	rm -f results/tiny-llama-cpu.json results/tiny-llama-cpu.partial.json
	$(BIN)/batchsim calibrate --model scenarios/tiny-llama.json --device cpu --minutes 2 -o results/tiny-llama-cpu.json
	$(BIN)/batchsim live live-demo --policy continuous --load 20 --attempts 3 --device cpu --set cost=results/tiny-llama-cpu.json
	$(BIN)/batchsim validate live-demo --device cpu --set cost=results/tiny-llama-cpu.json --at 50%,80% --repeats 3 --name demo --out results --json results/validation-demo.json

test: $(RUNTIME)
	$(PYTEST) -m "not slow and not gpu" --numprocesses auto --dist loadfile

test-all: $(ALL) real-clients
	$(PYTEST) -m "not gpu and not judged" --numprocesses auto --dist loadfile --durations 20
	$(PYTEST) -m judged

test-rest: $(ALL)
	$(PYTEST) -m "slow and not gpu and not judged" $(if $(DRAWN),--drawn $(DRAWN)) --numprocesses auto --dist loadfile --durations 40
	$(PYTEST) $(NEED_TORCH) -m "not slow and not gpu" --numprocesses auto --dist loadfile

WHEEL := build/wheel
test-wheel:
	rm -rf build/lib build/bdist.* $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt .
	cd $(WHEEL) && bin/batchsim --version && bin/batchsim run bursty --set 'load={mean_rate: [2/s]}' --set seeds=1 --no-pictures
	cd $(WHEEL) && bin/python -c 'from importlib import util, resources; assert not any(map(util.find_spec, ("sim", "calibrate", "scenarios"))); assert (resources.files("batchsim") / "py.typed").is_file()'

$(MYPYC): $(RUNTIME)
	$(PIP) --editable '.[test,accelerated]'
	@touch $@

accelerated: $(MYPYC)
	rm -f build/batchsim-*.whl
	$(BIN)/python tools/accelerated_wheel.py build/accelerated
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build build/accelerated
	@echo "pip install $$(ls build/batchsim-*.whl)"

wheels: $(MYPYC)
	$(PIP) --editable '.[wheels]'
	$(BIN)/python tools/accelerated_wheel.py build/accelerated
	$(BIN)/python -m cibuildwheel --output-dir build/wheels build/accelerated

TRIED := build/tried
test-accelerated: accelerated
	rm -rf $(TRIED)
	$(BIN)/python -m zipfile -e build/batchsim-*.whl $(TRIED)
	cp -r tests scenarios examples tools results pyproject.toml $(TRIED)
	$(BIN)/python -m tests.record_hashes --seeds 1 bursty systems >build/python.txt
	cd $(TRIED) && PYTHONPATH=. ../../$(BIN)/python -m batchsim --version | grep compiled
	cd $(TRIED) && PYTHONPATH=. ../../$(BIN)/python -m tests.record_hashes --seeds 1 bursty systems | diff - ../python.txt
	cd $(TRIED) && PYTHONPATH=. ../../$(BIN)/python -m pytest tests/unit/policies tests/unit/kernel tests/unit/kv tests/unit/cost tests/unit/scenario/test_setup.py tests/unit/cli/test_own_code.py -m "not slow and not gpu" --numprocesses auto --dist loadfile

mutants: $(TOOLS)
	$(BIN)/python -m tests.mutants

mutants-sample: $(TOOLS)
	$(BIN)/python -m tests.mutants --sample 25 --seed "$$(git rev-parse HEAD)" --least 85

real-engines: $(ALL) .vllm/.installed

.vllm/.installed: tools/real_engines/install_vllm.sh
	tools/real_engines/install_vllm.sh .vllm $(PYTHON)
	@touch $@

CLIENTS := openai==3.51.0 guidellm==0.8.1 aiperf==0.13.0
GATEWAYS := sglang-router==0.3.2 vllm-router==0.1.17 litellm==1.110.2 ai-dynamo==1.6.1
real-clients: $(CLIENTS:%=.clients/%.installed) $(GATEWAYS:%=.clients/%.installed)

# Of a gateway that asks for more than it needs, or for less, the packages that it needs stand in a file of its name.
NEEDS = $(wildcard tests/support/serving/gateways/$(firstword $(subst ==, ,$*)).txt)
.clients/%.installed:
	$(PYTHON) -m venv .clients/$(firstword $(subst ==, ,$*))
	$(if $(NEEDS),.clients/$(firstword $(subst ==, ,$*))/bin/python -m pip install --quiet --disable-pip-version-check -r $(NEEDS))
	.clients/$(firstword $(subst ==, ,$*))/bin/python -m pip install --quiet --disable-pip-version-check $(if $(filter ai-dynamo==%,$*),--no-deps) $*
	@touch $@

bench: $(RUNTIME)
	$(BIN)/python -m tests.bench

RUST := ai-dynamo-runtime==1.6.1
bench-rust: $(RUNTIME) .clients/$(RUST).installed
	$(BIN)/python -m tests.bench_rust --rust .clients/$(firstword $(subst ==, ,$(RUST)))/bin/python

lint: style types types-of-the-wheel site

style: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)
	$(BIN)/pyright

types-of-the-wheel: $(TOOLS)
	$(BIN)/python tools/accelerated_wheel.py --check

site docs: $(TOOLS)
	$(BIN)/python -m tools.docs_site build

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .vllm .clients build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find sim calibrate scenarios tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
