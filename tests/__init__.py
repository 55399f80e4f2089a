"""Tests; what they need and how it is made is in conftest.py and provisions.py."""
