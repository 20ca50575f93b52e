"""Compute the paper's analyses of draft quality (section 4), one module each.

A module defines its result (`analysis.Result`, whose JSON form is the `metrics` of a result file),
`compute` that measures it, `draw` for the figure, `page_tables` for the page and, for terminal
output, `table`. It exports them as one `Analysis`, which `registry` lists; `figures`, `page` and
the commands find it there. Shared code is in `analysis` (result, JSON), `traced` (results of
traces), `predictions` (survival against acceptance) and `cells` (tables as text). tau is tokens per
verify step, bonus included (`statistics`); intervals are 95% bootstrap over prompts
(`resampling`).
"""
