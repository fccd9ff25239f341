"""The page of `mrl report`: one HTML file that shows a run, two runs side by side, or a sweep."""
