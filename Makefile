# make run    a story from the bundled model; PROMPT="..." and ARGS="..." change it
# make test   everything that CI checks
# make bench  one MoE layer against this machine's limits; ARGS="..." for `cpumoe bench layer`
# make help   this text
# make clean  remove .venv and build
#
# PYTHON and CXX choose another interpreter or compiler.

PYTHON ?= python3
PROMPT ?= Once upon a time
ARGS ?=
MODEL ?= models/tiny-stories-moe
JOBS ?= $(shell nproc)
export PROMPT PYTHON

comma := ,
VENV := .venv
BIN := $(VENV)/bin
# The build's own tools stay out of .venv; kept, so that a second build compiles only what changed.
TOOLS := build/venv/bin
PIP := -m pip --disable-pip-version-check -qq
WHEEL = $$(echo build/wheel/*.whl)
SOURCES := $(shell find core bindings cmake src benchmarks/shapes benchmarks/peers -type f \
	-not -name '*_test.cc' -not -name '*_bench.cc' -not -name '*.pyc' 2>/dev/null) \
	CMakeLists.txt pyproject.toml README.md
CTEST := $(TOOLS)/ctest --output-on-failure --no-tests=error --test-dir

.PHONY: run test bench help clean stubs \
	test-tools test-cpp test-address test-thread test-python

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

run: $(VENV)/installed
	@$(BIN)/cpumoe generate $(MODEL) "$$PROMPT" $(ARGS)

bench: $(VENV)/installed
	@$(BIN)/cpumoe bench layer $(ARGS)

build/venv/ready: pyproject.toml
	@tools/preflight
	@$(PYTHON) -m venv build/venv
	@$(TOOLS)/python $(PIP) install $$($(TOOLS)/python tools/build_requires.py)
	@touch $@

build/wheel/ready: build/venv/ready $(SOURCES)
	@tools/preflight
	@echo "Building cpumoe (a minute or two the first time) ..."
	@rm -rf build/wheel
	@PATH="$(abspath $(TOOLS)):$$PATH" $(TOOLS)/python $(PIP) wheel --no-build-isolation --no-deps \
		-w build/wheel .
	@touch $@

$(VENV)/installed: build/wheel/ready
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) install --force-reinstall --no-deps $(WHEEL)
	@$(BIN)/python $(PIP) install $(WHEEL)
	@touch $@

# The extra brings torch, which `run` does not need.
$(VENV)/installed-test: $(VENV)/installed
	@echo "Installing what the tests need (torch, transformers) ..."
	@$(BIN)/python $(PIP) install "$(WHEEL)[test,dev]"
	@touch $@

test: test-tools test-cpp test-address test-thread test-python
	@echo "make test: all passed"

test-tools: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/sizes.py

# After a change in bindings/: writes src/cpumoe/_core.pyi, which a test holds to the module.
stubs: $(VENV)/installed-test
	$(BIN)/python -m nanobind.stubgen -q -m cpumoe._core -o src/cpumoe/_core.pyi

define cmake_build
	@$(TOOLS)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(TOOLS))/ninja \
		-DCPUMOE_TESTS=ON $(2) >build/$(1).log || { cat build/$(1).log; exit 1; }
	@$(TOOLS)/cmake --build build/$(1) -j $(JOBS) $(3)
endef

test-cpp: build/venv/ready
	$(call cmake_build,test,-DCPUMOE_BENCH=ON,)
	$(TOOLS)/python tools/check_isa_leak.py build/test
	$(CTEST) build/test

test-address: build/venv/ready
	$(call cmake_build,address,-DCPUMOE_SANITIZE=address$(comma)undefined,)
	$(CTEST) build/address

test-thread: build/venv/ready
	$(call cmake_build,thread,-DCPUMOE_SANITIZE=thread,--target machine_executor_test)
	$(CTEST) build/thread -R machine/executor

# Everything under the best ISA, what compares numbers under the others.
test-python: $(VENV)/installed-test
	@$(BIN)/python tools/pytest_per_isa.py

clean:
	rm -rf $(VENV) build
