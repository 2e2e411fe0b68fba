"""Several engines behind a router: their driver, routers, failures, an autoscaler, and their records as one."""
