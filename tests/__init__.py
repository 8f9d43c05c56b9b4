"""Tests of stalempi."""
