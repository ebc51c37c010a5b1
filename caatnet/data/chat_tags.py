"""Tags of chat templates that jinja2 lacks."""

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class Generation(Extension):
  """Tag ``{% generation %}``, which marks the assistant's text for training.

  The marked text is rendered into the prompt like any other text.
  """

  tags = frozenset({"generation"})

  def parse(self, parser: Parser) -> nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.Scope(body).set_lineno(line)
