"""The report of a plan: one HTML file, its twin in Markdown, and every table as CSV and JSON.

`cells` says how a value of a table is shown, `sections` what stands in the report in which order, `plan_pictures`
draws, `write_page` puts it all into a folder, `plan_text` is the short form for a terminal. All numbers shown are cells
of the tables.
"""
