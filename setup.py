"""Lets older tools install the package; everything is declared in setup.cfg."""

from setuptools import setup

setup()
