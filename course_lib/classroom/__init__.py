"""The machinery of a classroom: questions, checks, scenarios and widgets, without the content of any lesson."""
