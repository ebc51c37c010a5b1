"""The page with sliders: one file that loads nothing, and computes the plan.

Closed forms are the functions that `caatnet.studies.datacentre.expressions`
writes; what else a result has, such as simulations, is in tables with its
inputs.
"""

from collections.abc import Mapping
import html
import importlib.resources
import json
from typing import Any

from caatnet.studies.datacentre import closed_forms, expressions, report

# What the page calls the function of the formulas.
FUNCTION = "plan"


def text(result: Mapping[str, Any]) -> str:
  """Returns the page.

  Args:
    result: What `caatnet.studies.datacentre.study.run` returned.
  """
  template = importlib.resources.files(__package__).joinpath("page.html")
  formulas = closed_forms.formulas(result["given"])
  # A text in it must not end the script.
  data = json.dumps(
    dict(result) | {"notes": report.notes(result)}, allow_nan=False
  ).replace("</", "<\\/")
  parts = {
    "/*FUNCTION*/": expressions.javascript(formulas, FUNCTION),
    "/*RESULT*/": f"var result = {data};",
    "<!--TITLE-->": html.escape(
      f"Datacentre, from its {result['given']}: {result['rack']}, "
      f"{result['precision']}"
    ),
  }
  page = template.read_text(encoding="utf-8")
  for place, part in parts.items():
    page = page.replace(place, part)
  return page
