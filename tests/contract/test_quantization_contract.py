"""Every quantisation scheme keeps the rules of its role."""

from __future__ import annotations

import pytest

from headrace.contract import Quantization
from headrace.testing import FakeQuantization
from headrace.testing.suites import QuantizationContract
from headrace_quantization.schemes import W4A8, Fp8E4M3, W4A16Int4, W8A8Int8


class TestW8A8Int8(QuantizationContract):
    @pytest.fixture
    def plugin(self) -> Quantization:
        return W8A8Int8(W8A8Int8.Settings())


class TestW4A16Int4(QuantizationContract):
    @pytest.fixture(params=[32, 128])
    def plugin(self, request: pytest.FixtureRequest) -> Quantization:
        return W4A16Int4(W4A16Int4.Settings(group=request.param))


class TestW4A8(QuantizationContract):
    @pytest.fixture
    def plugin(self) -> Quantization:
        return W4A8(W4A8.Settings())


class TestFp8E4M3(QuantizationContract):
    @pytest.fixture(params=["channel", "square"])
    def plugin(self, request: pytest.FixtureRequest) -> Quantization:
        return Fp8E4M3(Fp8E4M3.Settings(blocks=request.param))


class TestFakeQuantization(QuantizationContract):
    @pytest.fixture
    def plugin(self) -> Quantization:
        return FakeQuantization(FakeQuantization.Settings())
