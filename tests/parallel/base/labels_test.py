"""Headings and texts of keys."""

import doctest

import pytest

from parallel.base import labels


@pytest.mark.parametrize(("value", "key", "text"), [
  (None, "x_s", "-"), (True, "x", "yes"), (False, "x", "no"),
  ("a_b", "x", "a_b"),
  (0, "x_s", "0"), (2e-6, "x_s", "2 us"), (1.5e-9, "x_s", "0.0015 us"),
  (-0.5, "x_s", "-500 ms"), (12_345.6, "x_s", "12,346 s"),
  (900.0, "rate_gb_s", "900"), (999, "bytes", "999 B"),
  (2.5e12, "sent_bytes", "2.5 TB"), (65_536, "size_bytes", "64 KiB"),
  (0.123, "busy_share", "12.3%"), (0.123, "shared", "0.123"),
  (123_456, "x", "123,456"), (1234.56, "x", "1,235"), (2e10, "x", "2e+10"),
  (9999.4, "x", "9,999"), (9999.7, "x", "10,000"), (1e4, "x", "10,000"),
  (1.0, "x_s", "1 s"), (2500, "x_bytes", "2.5 kB"), (1e6, "bytes", "1 MB"),
  (-12_345.6, "x", "-12,346"), (0.5, "a utilisation", "50.0%"),
  (0.5, "fraction_of_rate", "50.0%"),
  (0.0, "x", "0"), ([1, None, 2.5], "x", "1, -, 2.5"),
  ({"a": 0.5, "b_s": 2}, "share", "a 50.0%, b 2 s"), ({}, "x", ""),
])
def test_text_of_a_value_has_the_unit_of_its_key(value, key, text):
  assert labels.text(value, key) == text


@pytest.mark.parametrize(("key", "heading"), [
  ("link_gbit_s", "link (Gbit/s)"), ("peak_tflops", "peak (TFLOP/s)"),
  ("num_hops_us", "hops (us)"), ("wait_ms", "wait (ms)"),
  ("room_gb", "room (GB)"), ("num_sent_mb", "sent (MB)"),
  ("size_bytes", "size"), ("busy_share", "busy share"),
])
def test_heading_has_the_unit_that_the_texts_lack(key, heading):
  assert labels.heading(key) == heading


def test_items_of_mappings_are_found_unless_a_key_has_the_name():
  row = {"a": {"b": {"c": 1}}, "a.b": 2, "d": {"x.y": 3}}
  assert labels.find(row, "a.b") == 2
  assert labels.find(row, "d.x.y") == 3
  assert labels.find({"a": row["a"]}, "a.b.c") == 1
  for key in ("e", "a.e", "d.e"):
    with pytest.raises(KeyError):
      labels.find(row, key)


@pytest.mark.parametrize(("size_bytes", "text"), [
  (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (65536, "64 KiB"),
  (1536, "1.5 KiB"), (2**20 - 2**10, "1023 KiB"), (2**20, "1 MiB"),
  (3 * 2**20, "3 MiB"), (2**30, "1 GiB"), (2**41, "2048 GiB"),
])
def test_sizes_have_binary_units(size_bytes, text):
  assert labels.size_text(size_bytes) == text


def test_facts_are_lines_of_headings_and_texts():
  assert labels.format_items(
    {"num_rounds": 3, "wait_s": 0.01, "source": "x"}
  ) == (
    "rounds: 3\nwait: 10 ms\nsource: x"
  )


def test_examples_run():
  assert doctest.testmod(labels) == (0, 3)
