"""Where processes run: resource pools on Ray placement groups; and the phases of a step."""
