# Two commands: `make demo` and `make test`. The rest is for working on the project.

VENV ?= .venv
PRESET ?= q8_0
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
PY := $(BIN)/python
PATCHTOOL := $(PY) cpp_patches/patchtool.py
# llama-cpp-python is used for its ctypes layer only; ours is the one llama.cpp that gets compiled
PIP := PYTHONWARNINGS=ignore CMAKE_ARGS="$(CMAKE_ARGS) -DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(PY) -m pip --disable-pip-version-check

.PHONY: help demo test lint build bench bench-peer bench-convert fidelity wheel fork clean
.PHONY: patches-apply patches-refresh patches-check patches-stats

help:
	@echo "make demo             build everything and answer prompts with and without drafter"
	@echo "make test             ruff, mypy and pytest; DFLASH2_PEER=1 adds comparisons with upstream"
	@echo "make build            the native libraries alone"
	@echo "make bench            speed per workload and with many requests, into docs/speed.md"
	@echo "make bench-peer       a short look at speed against the unpatched llama.cpp"
	@echo "make fidelity         what quantization costs the drafter, into docs/quantization.md"
	@echo "make bench-convert    time and memory of conversions against the unpatched llama.cpp"
	@echo "make wheel            wheels of this package and what it needs, in dist/"
	@echo "make fork DIR=x       a full patched llama.cpp source tree"
	@echo "make patches-apply | patches-refresh | patches-check | patches-stats"
	@echo "make lint | clean"

demo: $(VENV)/.installed
	@target=$$($(PY) -m tests.provisions target) && \
	draft=$$($(PY) -m tests.provisions drafter $(PRESET)) && \
	$(PY) -m dflash2_gguf.demo --target "$$target" --draft "$$draft" $(ARGS)

test: $(VENV)/.installed-test lint
	@if [ "$(DFLASH2_PEER)" = 1 ]; then $(PATCHTOOL) build --peer; fi
	DFLASH2_PEER=$(DFLASH2_PEER) $(PY) -m pytest -n auto --maxprocesses 4 --dist loadgroup \
		--no-loadscope-reorder $(PYTEST_ARGS)

# mypy sees the package as it is installed: convert/ and quant_presets/ inside dflash2_gguf/
lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/mypy && mkdir -p build/mypy/dflash2_gguf
	@ln -s $(CURDIR)/dflash2_gguf/*.py $(CURDIR)/dflash2_gguf/py.typed $(CURDIR)/convert \
		$(CURDIR)/quant_presets build/mypy/dflash2_gguf/
	cd build/mypy && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p dflash2_gguf
	cd cpp_patches && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml *.py

build: $(VENV)/.tools
	@$(PATCHTOOL) build

bench: MEASURE := --results build/bench.jsonl --write docs/speed.md
bench-peer: MEASURE := --results build/bench-peer.jsonl --parts speed --limit 1 -n 48
bench bench-peer: $(VENV)/.installed
	@server=$$($(PATCHTOOL) build --peer | tail -1)/llama-server && \
	target=$$($(PY) -m tests.provisions target) && \
	draft=$$($(PY) -m tests.provisions drafter $(PRESET)) && \
	$(PY) -m tests.workloads > build/workloads.jsonl && \
	$(PY) -m dflash2_gguf.bench --target "$$target" --draft "$$draft" --server "$$server" \
		--workloads build/workloads.jsonl $(MEASURE) $(ARGS)

# the first prompts judge, the last ones calibrate; of each of the three sets equally many
JUDGES ?= 15
CALIBRATING ?= 24
FIDELITY := build/fidelity
PROMPTS := tests/assets/prompts/prompts.jsonl
CHECKPOINT := tests/assets/smollm2-135m-dflash2
PRESETS := $(sort $(patsubst quant_presets/%.toml,%,$(wildcard quant_presets/*.toml)))
fidelity: $(VENV)/.installed-test
	@rm -rf $(FIDELITY) && mkdir -p $(FIDELITY)/plain $(FIDELITY)/imatrix
	@head -n $(JUDGES) $(PROMPTS) > $(FIDELITY)/judged.jsonl
	@tail -n $(CALIBRATING) $(PROMPTS) > $(FIDELITY)/calibration.jsonl
	@target=$$($(PY) -m tests.provisions target) && convert="$(BIN)/dflash2-convert" && \
	from="$$convert $(CHECKPOINT) --target $$target --force" && \
	$$from $(foreach p,$(PRESETS),--preset $(p)) -o $(FIDELITY)/plain && \
	$$convert calibrate -m $$target -d $(FIDELITY)/plain/*-BF16.gguf --force \
		--prompts $(FIDELITY)/calibration.jsonl -n 48 -c 2048 $(ARGS) -o $(FIDELITY)/imatrix.gguf && \
	$$from $(foreach p,$(filter-out bf16 f16 f32 q8_0,$(PRESETS)),--preset $(p)) \
		--imatrix $(FIDELITY)/imatrix.gguf -o $(FIDELITY)/imatrix && \
	$$convert fidelity -m $$target --prompts $(FIDELITY)/judged.jsonl -n 24 -c 2048 \
		--plot docs/quantization.svg --page docs/quantization.md $(ARGS) \
		$(FIDELITY)/plain/*-BF16.gguf $$(ls -S $(FIDELITY)/plain/* $(FIDELITY)/imatrix/* | grep -v BF16)

bench-convert: $(VENV)/.installed-test
	@pin=$$($(PATCHTOOL) build --peer | tail -1) && target=$$($(PY) -m tests.provisions target) && \
	$(PY) -m tests.convert.bench_convert "$$pin" "$$target" $(ARGS)

wheel: $(VENV)/.tools
	$(PIP) wheel --wheel-dir dist .

fork: $(VENV)/.tools
	@test -n "$(DIR)" || { echo "error: say where: make fork DIR=llama.cpp-dflash2" >&2; exit 1; }
	@$(PATCHTOOL) fork "$(DIR)"

patches-apply patches-refresh patches-check patches-stats: $(VENV)/.tools
	@$(PATCHTOOL) $(@:patches-%=%)

clean: $(VENV)/.tools
	@$(PATCHTOOL) clean
	rm -rf dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis $(VENV)

# The environment: what is missing on the machine is said before anything is downloaded.
$(VENV)/.tools:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10 or newer found" >&2; \
		echo "hint: install one, or name it with make PYTHON=..." >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
		echo "error: no C++ compiler found" >&2; \
		echo "hint: install one (Debian, Ubuntu: apt install g++)" >&2; exit 1; }
	@command -v git >/dev/null || { echo "error: git is not installed" >&2; \
		echo "hint: Debian, Ubuntu: apt install git" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "error: $(PYTHON) cannot create an environment" >&2; \
		echo "hint: Debian, Ubuntu: apt install python3-venv" >&2; exit 1; }
	@command -v cmake >/dev/null || $(PIP) install --quiet cmake
	@command -v ninja >/dev/null || $(PIP) install --quiet ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.tools build pyproject.toml setup.py
	@test $@ -nt pyproject.toml && test $@ -nt setup.py || $(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@test $@ -nt pyproject.toml || { $(PIP) install --quiet --editable '.[test,dev]' && \
		$(PIP) install --quiet --no-deps dflash==0.1.0; }
	@touch $@
