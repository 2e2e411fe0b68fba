"""Pages in HTML: of a run (`run_page`), of a capacity search (`capacity_page`) and of a plan, with a twin in Markdown
and every table as CSV and JSON (`plan_page`, by the sections of `plan_sections`). Numbers shown are cells of tables.
"""
