"""Schedulers of real engines, installed beside batchsim or in environments of their own, as policies."""
