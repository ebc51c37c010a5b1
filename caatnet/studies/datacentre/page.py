"""Interactive page of a plan: one self-contained HTML file with sliders.

The page evaluates the closed forms with JavaScript that
`caatnet.studies.datacentre.expressions` generates. Other results, such as
simulations, do not follow the sliders; they are tables with their inputs.
"""

from collections.abc import Mapping
import html
import importlib.resources
import json
from typing import Any

from caatnet.studies.datacentre import closed_forms, expressions, report

# Name of the JavaScript function that evaluates the formulas.
FUNCTION = "plan"


def render_html(result: Mapping[str, Any]) -> str:
  """Returns the HTML of the page.

  Args:
    result: Result of `caatnet.studies.datacentre.study.run`.
  """
  template = importlib.resources.files(__package__).joinpath("page.html")
  formulas = closed_forms.formulas(result["given"])
  # Escapes "</", so that a string in the data cannot end the script.
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
